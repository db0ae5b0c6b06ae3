"""The metadata server of an EC2 instance, IMDSv2 only: instance_metadata.py INSTANCE ADDRESS.

It announces the interruption of a Spot Instance while /run/interruption exists.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

INSTANCE, ADDRESS = sys.argv[1:]
TOKEN = "token-of-this-session"
CREDENTIALS = {"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c"}
CREDENTIALS |= {"LastUpdated": "2026-01-01T00:00:00Z", "Expiration": "2099-01-01T00:00:00Z"}
FACTS = {
    "instance-id": INSTANCE,
    "local-ipv4": ADDRESS,
    "placement/region": "us-east-1",
    "iam/security-credentials/": "train",
    "iam/security-credentials/train": json.dumps(CREDENTIALS),
}


class Handler(BaseHTTPRequestHandler):
    """Answers as https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html."""

    def do_PUT(self) -> None:
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        valid = self.path == "/latest/api/token" and seconds.isdigit() and "X-Forwarded-For" not in self.headers
        self.answer(200 if valid else 400, TOKEN if valid else "")

    def do_GET(self) -> None:
        name = self.path.removeprefix("/latest/meta-data/")
        if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            self.answer(401, "")
        elif name == "spot/instance-action" and Path("/run/interruption").exists():
            self.answer(200, '{"action": "stop", "time": "2026-01-01T00:02:00Z"}')
        else:
            self.answer(200 if name in FACTS else 404, FACTS.get(name, ""))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("169.254.169.254", 80), Handler)
    print("ready", flush=True)
    server.serve_forever()
