"""Bring in what the template has learnt: python scripts/new.py --update [--from URL] [--version TAG]; or --diff"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    words = sys.argv[1:]
    if not {"--update", "--diff"} & set(words):
        sys.exit(__doc__)
    source = json.loads((ROOT / ".template.json").read_text())["template"]
    if "--from" in words[:-1]:
        source = words[words.index("--from") + 1]
    with tempfile.TemporaryDirectory() as clone:  # the template's own script does the work
        subprocess.run(["git", "clone", "-q", "--", source.removeprefix("git+"), clone], cwd=ROOT, check=True)
        command = [sys.executable, "-B", f"{clone}/scripts/new.py", *words]
        sys.exit(subprocess.run(command, env={**os.environ, "PROJECT_TO_UPDATE": str(ROOT)}).returncode)
