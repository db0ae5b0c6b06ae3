"""The responses of a W&B server at the start of a run."""

BUCKET = {
    "id": "abc",
    "name": "first",
    "displayName": "name/first",
    "config": "{}",
    "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}},
    "historyLineCount": 0,
}
GRAPHQL = {
    "data": {
        "model": {"bucket": None},
        "viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}},
        "upsertBucket": {"inserted": True, "bucket": BUCKET},
        "createRunFiles": {"runID": "abc", "uploadHeaders": [], "files": []},
        "entity": {"organization": {"coreWeaveOrganizationId": None}},
        "serverInfo": {"features": []},
    }
}
