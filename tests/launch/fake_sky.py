#!/usr/bin/env python3
"""The command ``sky`` of SkyPilot 0.14.1, as strict: options that it does not have, and wrong tasks, are rejected.

``sky_schema.json`` has its own JSON schemas; options are those of ``sky jobs <command> --help``. The file
``$FAKE_SKY/jobs.json`` has the jobs, ``$FAKE_SKY/answer.json`` how the next command fails.
"""

import json
import os
import re
import sys
from pathlib import Path

import jsonschema
import yaml

SCHEMA = json.loads(Path(__file__).with_name("sky_schema.json").read_text())
OPTIONS = {  # and whether each takes a value
    "launch": {"--yes": False, "--detach-run": False, "--config": True, "--secret": True},
    "queue": {"--all": False, "--verbose": False, "--output": True},
    "cancel": {"--yes": False},
    "logs": {"--tail": True, "--follow": False, "--no-follow": False},
}
STATE = Path(os.environ["FAKE_SKY"])


def main() -> None:
    """Answer one command."""
    assert os.environ["SKYPILOT_DISABLE_USAGE_COLLECTION"] == "1"
    assert "PYTHONPATH" not in os.environ  # of packages that conflict with SkyPilot's
    group, verb, *rest = sys.argv[1:]
    assert group == "jobs"
    given, places = parse(OPTIONS[verb], rest)
    with (STATE / "commands").open("a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    answer = STATE / "answer.json"
    fault = json.loads(answer.read_text()).get(verb) if answer.is_file() else None
    if fault and not fault.get("late"):
        sys.exit(fault["text"])
    file = STATE / "jobs.json"
    jobs = json.loads(file.read_text()) if file.is_file() else []
    if verb == "launch":
        assert sys.stdin.read() == ""  # nobody answers a question
        jobs.append(launch(given, *places) | {"job_id": len(jobs) + 1})
        file.write_text(json.dumps(jobs))
        print(
            f"\n📋 Useful Commands\nManaged Job ID: {len(jobs)}\n├── To cancel the job:\t\tsky jobs cancel {len(jobs)}"
        )
    elif verb == "queue":
        assert given["--output"] == ["json"]
        if not file.is_file():
            sys.exit("sky.exceptions.ClusterNotUpError: No in-progress managed jobs.")
        print("\x1b[36mNew version of SkyPilot available\x1b[0m [0.15]")
        print(json.dumps(jobs, indent=2))
    else:
        (place,) = places
        found = next(job for job in jobs if job["job_id"] == int(place))
        if verb == "cancel":
            found["status"] = "CANCELLING"
            file.write_text(json.dumps(jobs))
        else:
            print((STATE / "log").read_text() if (STATE / "log").is_file() else "", end="")
            sys.exit(100 if found["status"].startswith("FAILED") else 0)
    if fault:
        sys.exit(fault["text"])


def parse(options: dict[str, bool], arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Split arguments into options with their values, and the rest."""
    given: dict[str, list[str]] = {}
    places, queue = [], list(arguments)
    while queue:
        argument = queue.pop(0)
        if not argument.startswith("-"):
            places.append(argument)
            continue
        if argument not in options:
            sys.exit(f"Error: No such option: {argument}")
        given.setdefault(argument, []).append(queue.pop(0) if options[argument] else "")
    return given, places


def launch(given: dict[str, list[str]], file: str) -> dict[str, object]:
    """Check a task and the configuration, and return the job."""
    task = yaml.safe_load(Path(file).read_text())
    jsonschema.validate(task, SCHEMA["task"])
    jsonschema.validate(task["resources"], SCHEMA["resources"])
    for pair in given.get("--config", ()):
        key, _, value = pair.partition("=")
        cloud, name = key.split(".")
        assert name == "remote_identity"
        jsonschema.validate(value, SCHEMA["remote_identity"][cloud])
    for name in given.get("--secret", ()):
        assert os.environ[name], f"{name} is not set"
    # Of its clusters, and _VALID_NAME_REGEX of its task.py
    for form in (r"[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?", r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*"):
        assert re.fullmatch(form, task["name"])
    infra = (task["resources"].get("any_of") or [task["resources"]])[0]["infra"]
    return {"job_name": task["name"], "status": "STARTING", "infra": infra, "recovery_count": 0, "failure_reason": None}


if __name__ == "__main__":
    main()
