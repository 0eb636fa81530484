"""Signs that an attempt was after its reward and not its task. docs/integrity.md says what each of them decides."""
