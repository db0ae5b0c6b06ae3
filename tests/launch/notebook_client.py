"""A browser for tests: requests to a Jupyter server, and a notebook that is run through one of its kernels.

``python notebook_client.py <url> <file with the token> <notebook>`` prints what it found as JSON.
"""

import json
import sys
import uuid
from pathlib import Path
from typing import Any

import requests
import websocket


def run_cell(channels: websocket.WebSocket, code: str) -> dict[str, Any]:
    """Run code in the kernel; returns the content of its reply."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": "execute_request",
        "username": "",
        "session": "",
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    channels.send(json.dumps(message))
    while True:
        reply = json.loads(channels.recv())
        if reply["msg_type"] == "execute_reply" and reply["parent_header"]["msg_id"] == header["msg_id"]:
            return dict(reply["content"])


def status_of(url: str, token: str = "") -> int:
    """Return the HTTP status with which the server answers the request for a websocket."""
    try:
        websocket.create_connection(url + (f"?token={token}" if token else ""), timeout=30).close()
    except websocket.WebSocketBadStatusException as error:
        return int(error.status_code)
    return 101


def main(url: str, token_file: str, notebook: str) -> None:
    """Request pages with and without the token, and run the notebook."""
    token = Path(token_file).read_text()
    authorized = {"Authorization": f"token {token}"}
    kernel = requests.post(f"{url}/api/kernels", headers=authorized).json()["id"]
    channels = f"{url.replace('http', 'ws')}/api/kernels/{kernel}/channels"
    session = requests.Session()
    found = {
        "page": session.get(f"{url}/lab", allow_redirects=False).headers.get("Location"),
        "api": session.get(f"{url}/api/kernels").status_code,
        "wrong token": session.get(f"{url}/api/kernels", headers={"Authorization": "token x"}).status_code,
        "new kernel": session.post(f"{url}/api/kernels").status_code,
        "websocket": status_of(channels),
        "websocket with token": status_of(channels, token),
        "page with token": requests.get(f"{url}/lab", headers=authorized).status_code,
        "other host": requests.get(f"{url}/lab", headers={**authorized, "Host": "evil.example"}).status_code,
    }
    contents = requests.get(f"{url}/api/contents", headers=authorized).json()["content"]
    found["files"] = [file["name"] for file in contents]
    socket = websocket.create_connection(f"{channels}?token={token}", timeout=150)
    cells = [cell for cell in json.loads(Path(notebook).read_text())["cells"] if cell["cell_type"] == "code"]
    found["cells"] = [run_cell(socket, "".join(cell["source"])) for cell in cells]
    socket.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
