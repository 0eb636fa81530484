"""Ten lines: create a sandbox, run commands in it, move files, throw it away.

python examples/first_light.py
"""

import barchan

with barchan.connect() as client, client.create("debian", memory_mib=512, ttl_s=600) as sandbox:
    print(sandbox.exec(["python3", "-c", "print(6*7)"], timeout_s=10).check().text, end="")
    sandbox.files.write("notes/a.txt", b"hello\n")
    print(sandbox.exec("cat notes/a.txt | tr a-z A-Z").text, end="")
    process = sandbox.start("for i in 1 2 3; do echo $i; sleep 0.1; done", process_id="step-1")
    for stream, _, data in process.output(offset=0):
        print(stream, data.decode().split())
    print(process.wait().exit_code, sandbox.files.read("notes/a.txt"))
