"""What Azure's own package makes of job files: run by its interpreter with the address of a server and the files.

Prints for each file its errors, and then submits it to the server.
"""

import json
import os
import sys
import time
from typing import Any

server, workspace, *files = sys.argv[1:]
os.environ["ARM_CLOUD_METADATA_URL"] = f"{server}/metadata/endpoints"

from azure.ai.ml import MLClient, load_job  # noqa: E402
from azure.core.credentials import AccessToken, AccessTokenInfo  # noqa: E402


class Credential:
    def get_token(self, *_: str, **__: Any) -> AccessToken:
        return AccessToken("token", int(time.time()) + 3600)

    def get_token_info(self, *_: str, **__: Any) -> AccessTokenInfo:
        return AccessTokenInfo("token", int(time.time()) + 3600)


_, _, subscription, _, group, *_, name = workspace.split("/")
client = MLClient(Credential(), subscription, group, name, enable_telemetry=False)
for file in files:
    try:
        job = load_job(file)
        found = job._validate()
        errors = dict(found.error_messages)
    except Exception as error:
        errors = {type(error).__name__: str(error)}
    print(json.dumps(errors))
    if not errors:
        client.jobs.create_or_update(job)
