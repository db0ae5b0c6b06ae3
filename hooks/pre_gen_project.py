"""Refuse names that cannot be both a distribution and a package."""

import json
import re
import sys

# As JSON, in which a quote never stands without a backslash: no answer ends the string.
ANSWERS = json.loads(r"""{{ cookiecutter | jsonify }}""")
NAME, AUTHOR = ANSWERS["project_slug"], ANSWERS["author"]
RESERVED = {"boltcutter", "lightning", "torch", "torchmetrics", "wandb", "numpy", "src", "tests", "configs", "scripts"}

if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", NAME):
    sys.exit(f"error: {NAME}: a name consists of lower-case words joined by hyphens; try my-project")
if (package := NAME.replace("-", "_")) in sys.stdlib_module_names or package in RESERVED:
    sys.exit(f"error: {NAME}: another package is called {package}; try {NAME}-project")
if not AUTHOR.isprintable():
    sys.exit(f"error: author={AUTHOR!r} is not a name on one line")
