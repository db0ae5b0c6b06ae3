"""Pages of the site that are made when it is built: of README, configuration, docstrings and import rules."""

import ast
import html
import json
import os
import re
from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from boltcutter.cli.table import COMMANDS
from boltcutter.extend import load_object

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
COMMANDS_OF = re.compile(r"^```bash\n.*?^```$", re.M | re.S)
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
OPTIONS = {
    "boltcutter.extend": "{members: true, show_root_heading: false, filters: ['!^_']}",
    "boltcutter.protocols": "{members: true, show_root_heading: false, filters: ['!^_']}",
}
BOX, GAP, HEIGHT = 132, 12, 34  # of the drawing, in pixels
RANKS = {  # in searches
    "recipes": 1.3,
    "questions": 1.3,
    "quality": 0.6,
    "configs": 0.6,
    "reference": 0.6,
    "threat_model": 0.5,
    "benchmarks": 0.5,
    "changelog": 0.2,
}

ALSO: dict[str, str] = {}  # other words for a section, by its address: `<!-- also: … -->` below its heading


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages of the reference to the navigation."""
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    reference.append("reference/commands.md")
    reference.append({"Configuration": [f"configs/{group}.md" for group in groups()]})
    reference.append({"Python": ["reference/api.md", "reference/extend.md", "reference/protocols.md"]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {target: within_site((ROOT / source).read_text(), "") for source, target in PAGES.items()}
    pages |= {f"configs/{group}.md": group_page(group) for group in groups()}
    pages |= {"reference/api.md": api_page(), "architecture.md": architecture_page()}
    pages["reference/commands.md"] = commands_page()
    for module in OPTIONS:
        name = module.rpartition(".")[2]
        options = "\n".join(f"      {line}" for line in yaml.safe_dump(yaml.safe_load(OPTIONS[module])).splitlines())
        pages[f"reference/{name}.md"] = f"# `{module}`\n\n::: {module}\n    options:\n{options}\n"
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Rank the page in searches; rewrite links that lead out of docs; show the files of an example of the gallery.

    Comments of commands are not aligned on the site, where lines are wrapped.
    """
    source = page.file  # type: ignore[attr-defined]
    page.meta["search"] = {"boost": RANKS.get(Path(source.src_uri).with_suffix("").parts[0], 1.0)}  # type: ignore[attr-defined]
    markdown = COMMANDS_OF.sub(lambda block: re.sub(r"(?<=\S) {3,}# ", "  # ", block.group()), markdown)
    if source.generated_by:
        return markdown
    file = ROOT / "docs" / source.src_uri
    text = within_site(markdown, str(file.parent.relative_to(ROOT)))
    for code in (file.with_suffix(".py"), file.parent / "configs" / "experiment" / f"{file.stem}.yaml"):
        if code.is_file():
            language = "python" if code.suffix == ".py" else "yaml"
            text += f"\n## {code.name}\n\n```{language}\n{code.read_text().rstrip()}\n```\n"
    return text


def on_page_content(html: str, page: object, **_: object) -> str:
    """Remember the comments that give other words for the section in which they are."""
    found = location = page.file.url  # type: ignore[attr-defined]
    for level, anchor, words in re.findall(r'<h([1-6]) id="([^"]*)"|<!-- also: (.*?) -->', html, flags=re.S):
        found = f"{location}#{anchor}" if level > "1" else location if level else found
        if words:
            ALSO[found] = words
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Add these words to the index of the search, where no page shows them."""
    file = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(file.read_text())
    for section in index["docs"]:
        if section["location"] in ALSO:
            section["also"] = ALSO[section["location"]]
    file.write_text(json.dumps(index, separators=(",", ":")))


def within_site(text: str, folder: str) -> str:
    """Rewrite links between files of the repository as links between pages; to other files there are none.

    Args:
        text: Markdown.
        folder: Of the file that has the text, relative to the repository.
    """

    def rewrite(match: re.Match[str]) -> str:
        picture, label, path, anchor = match.groups()
        target = (ROOT / folder / path).resolve().relative_to(ROOT)
        if str(target) in PAGES:
            target = Path("docs", PAGES[str(target)])
        if target.parts[0] == "docs" and target.suffix not in (".py", ".yaml"):
            return f"{picture}[{label}]({os.path.relpath(target, folder or 'docs')}{anchor or ''})"
        if folder == "docs/gallery":  # whose pages show the file
            return f"[`{label}`](#{re.sub('[^a-z0-9]', '', label)})"
        return label if label.startswith("`") else f"`{target}`" if label == target.name else f"{label} (`{target}`)"

    return LINK.sub(rewrite, text)


def groups() -> list[str]:
    """Names of the config groups."""
    return sorted(folder.name for folder in (ROOT / "configs").iterdir() if folder.is_dir())


def group_page(group: str) -> str:
    """The options of a config group: description, YAML, and the arguments of the class that it names."""
    files = sorted((ROOT / "configs" / group).glob("*.yaml"))
    parts = [f"# `{group}`\n\nOptions of the config group `{group}`, selected by `{group}=<option>`.\n"]
    texts = {file.stem: file.read_text() for file in files}
    described = {name: text.partition("\n")[0].removeprefix("# ") for name, text in texts.items()}
    parts.append("| option | |\n|---|---|")
    parts += [f"| [`{name}`](#{name}) | {escaped(text)} |" for name, text in described.items()]
    public = {f"{module}.{name}" for name, module in public_names().items()}  # on the page of the API
    shown: set[str] = set()
    for name, text in texts.items():
        body = text.partition("\n")[2].strip("\n")
        parts.append(f"\n## {name}\n\n{escaped(described[name])}\n")
        parts.append(f"```yaml\n# configs/{group}/{name}.yaml\n{body}\n```\n" if body else "It has no settings.\n")
        for target in re.findall(r"_target_: (boltcutter\w*\.[\w.]+)", body):
            if target not in shown:
                shown.add(target)
                elsewhere = "    options: {skip_local_inventory: true}\n" if target in public else ""
                parts.append(f"::: {target}\n{elsewhere}")
    return "\n".join(parts)


def escaped(text: str) -> str:
    """Text as Markdown shows it unchanged in a table."""
    return re.sub(r"(?<!\\)([<*_|])(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"\\\1", text)


def public_names() -> dict[str, str]:
    """The modules of the names of ``import boltcutter``, by its stub for type checkers."""
    tree = ast.parse((ROOT / "src" / "boltcutter" / "__init__.pyi").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name}


def api_page() -> str:
    """The public names of ``import boltcutter``."""
    table = public_names()
    functions = sorted(name for name in table if name[0].islower())
    classes = sorted(name for name in table if name[0].isupper())
    parts = ["# The names of `import boltcutter`\n\n[Python API](../api.md) shows how they are used."]
    for title, names in (("Functions", functions), ("Classes", classes)):
        parts += [f"\n## {title}\n", *(f"::: {table[name]}.{name}\n" for name in names)]
    return "\n".join(parts)


def commands_page() -> str:
    """Each command, with what its ``--help`` says first, and the flags of its own."""
    parts = [
        "# Commands\n\nEach begins with `boltcutter`, and has `--help`, which also lists the options of the "
        "configuration. `--json` prints the result as one JSON object. In a project, `python scripts/train.py` is "
        "`boltcutter train`, and so are the other scripts.\n"
    ]
    for name, command in COMMANDS.items():
        title, _, rest = command.usage.partition("\n")
        text, _, usage = title.partition(f": boltcutter {name}")
        parts.append(f"## {name}\n\n{escaped(text)}.\n\n```text\nboltcutter {name}{usage}\n{rest.rstrip()}".rstrip())
        parts.append("```\n")
        flags = load_object(command.flags) if command.flags else {}
        parts += [f"- `{flag}`: {escaped(meaning)}" for flag, meaning in flags.items()] + [""]
    return "\n".join(parts)


def architecture_page() -> str:
    """The import rules of pyproject.toml as a drawing."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"\w+", line) for line in next(c for c in contracts if c["type"] == "layers")["layers"]]
    return (
        "# Architecture\n\nThe drawing is made from the import contracts in `pyproject.toml`: a package of "
        "`src/boltcutter` imports only packages of the rows below its own. "
        "[Contributing](contributing.md#architecture) says what is in each.\n\n"
        f'<div markdown="0">{drawing(layers)}</div>\n'
    )


def drawing(layers: list[list[str]]) -> str:
    """An SVG with a row for each layer, the highest first."""
    width = max(len(row) for row in layers) * (BOX + GAP) + GAP
    shapes: list[str] = []
    y = float(GAP)
    for row in layers:
        left = (width - len(row) * (BOX + GAP) + GAP) / 2
        for index, name in enumerate(row):
            x = left + index * (BOX + GAP)
            shapes.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="5"/>')
            shapes.append(f'<text x="{x + BOX / 2}" y="{y + HEIGHT / 2 + 4}">{html.escape(name)}</text>')
        y += HEIGHT + GAP
    return (
        f'<svg class="architecture" viewBox="0 0 {width} {y}" role="img" aria-label="Packages and their imports" '
        'fill="none" stroke="currentColor" font-size="13" text-anchor="middle">'
        + "".join(shape.replace("<text", '<text fill="currentColor" stroke="none"') for shape in shapes)
        + "</svg>"
    )
