"""inspect_ai's tasks in sandboxes of Barchan: `--sandbox barchan`.

inspect_ai finds `provider` by the entry point of its group and imports it, which registers the provider. Its tasks say
what they want by `config.BarchanConfig`. What is in `outcome` needs nothing of inspect_ai.
"""
