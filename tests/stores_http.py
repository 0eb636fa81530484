"""A directory served over HTTP by a real server, as a store that can only be read."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = """
daemon off;
master_process on;
user root;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location /blobs/ {{ alias {root}/; {more} }}
    }}
}}
"""


@contextmanager
def served(root: Path, folder: Path, more: str = "") -> Iterator[str]:
    """Serve `root` with nginx, whose own files are in `folder`; gives the URL. `more`: directives for the files."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        config = folder / "nginx.conf"
        config.write_text(CONFIG.format(folder=folder, port=port, root=root, more=more))
        # A socket named there is taken over instead of a port opened: nobody else can have got it in between.
        environment = {**os.environ, "NGINX": f"{listening.fileno()};"}
        command = ["nginx", "-c", str(config), "-e", str(folder / "error.log")]
        server = subprocess.Popen(command, env=environment, pass_fds=(listening.fileno(),))
    try:
        yield f"http://127.0.0.1:{port}/blobs"
    finally:
        server.terminate()
        server.wait(10)
