import hashlib
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
from conftest import QUICK, Script

from boltcutter.config.errors import ConfigError
from boltcutter.project import Project
from boltcutter.run import trust
from boltcutter_export import registry
from boltcutter_remote import transfer


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    (tmp_path / "project").mkdir()
    return Project.at(tmp_path / "project")


def add(project: Project, folder: Path, name: str = "digits", ckpt: str = "best") -> str:
    return registry.register(project, name, folder, f"{folder}/checkpoints/{ckpt}.ckpt")


def set_score(project: Project, number: int, **score: object) -> None:
    file = project.root / "registry" / "digits" / f"v{number}" / registry.LINEAGE
    lineage = json.loads(file.read_text())
    file.write_text(json.dumps(lineage | {"best": lineage["best"] | score}))


def test_versions_are_numbered_and_found(project: Project, trained: Path) -> None:
    assert [add(project, trained) for _ in range(3)] == [f"registry:digits@v{number}" for number in (1, 2, 3)]
    parent = project.root / "registry" / "digits"
    assert {path.name for path in parent.iterdir()} == {"v1", "v2", "v3"}
    lineage = json.loads((parent / "v2" / "registered.json").read_text())
    record = json.loads((trained / "record.json").read_text())
    assert (lineage["run"], lineage["commit"]) == (record["id"], record["git"]["commit"])
    assert lineage["best"]["monitor"] == "val/loss"
    assert {"record.json", "checkpoints/best.ckpt"} <= lineage["files"].keys()
    assert not [name for name in lineage["files"] if name.startswith(("logs", "code/", "checkpoints/last"))]
    for number, score in ((1, 0.3), (2, 0.1), (3, 0.2)):
        set_score(project, number, score=score)
    places = {which: Path(registry.find(project, f"registry:digits{which}")) for which in ("", "@latest", "@best")}
    assert places == {"": parent / "v3", "@latest": parent / "v3", "@best": parent / "v2"}
    for number in (1, 2, 3):
        set_score(project, number, mode="max")
    assert Path(registry.find(project, "registry:digits@best")).name == "v1"
    for score in (None, float("nan")):  # of a checkpoint before the first validation, or of a run that diverged
        set_score(project, 3, score=score)
        assert Path(registry.find(project, "registry:digits@best")).name == "v1"
    set_score(project, 3, monitor="val/accuracy", score=0.2)
    with pytest.raises(ConfigError, match=r"versions have no metric in common \(val/accuracy, val/loss\)"):
        registry.find(project, "registry:digits@best")


def test_links_and_fifos_are_not_registered(project: Project, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (tmp_path / "secret").write_text("a key")
    (folder / "evaluation" / "more").mkdir(parents=True)
    (folder / "evaluation" / "more" / "link.npz").symlink_to(tmp_path / "secret")
    (folder / "evaluation" / "loop").symlink_to("loop")
    (folder / "evaluation" / "log.jsonl").unlink(missing_ok=True)
    os.mkfifo(folder / "evaluation" / "log.jsonl")
    (folder / "report.html").unlink(missing_ok=True)
    (folder / "report.html").symlink_to(tmp_path / "secret")
    registry.collect(folder, str(folder / "checkpoints" / "best.ckpt"), tmp_path / "draft")
    assert not {"link.npz", "loop", "log.jsonl", "report.html"} & {path.name for path in tmp_path.glob("draft/**/*")}
    assert (tmp_path / "draft" / "evaluation" / "more").is_dir()


@pytest.mark.parametrize("signed", [True, False, None])
def test_only_a_run_that_the_user_has_signed_is_signed_again(
    project: Project, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: bool | None
) -> None:
    monkeypatch.setattr(trust, "KEY_FILE", tmp_path / "key")
    folder, config = tmp_path / "run", {"name": "a", "checkpoints": str(saved.parent), "data": {"_target_": "os.mkdir"}}
    folder.mkdir()
    valid = trust.sign(config)
    signature = {True: valid, False: "0" * 64, None: None}[signed]
    (folder / "record.json").write_text(json.dumps({"id": "a", "config": config, "signature": signature}))
    registry.register(project, "digits", folder, str(saved))
    record = json.loads((project.root / "registry/digits/v1/record.json").read_text())
    assert record["config"] == config | {"checkpoints": "${folder}/checkpoints"}
    assert record["best"] == "checkpoints/last.ckpt"
    assert trust.is_signed(record["config"], record["signature"]) is bool(signed)
    assert (record["signature"] == signature) is not bool(signed)


def test_files_are_hashed_in_blocks(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 26)
    tracemalloc.start()
    found = registry.sha256(tmp_path / "large")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == hashlib.sha256(bytes(1 << 26)).hexdigest()
    assert peak < 1 << 23


def test_an_interrupted_registration_is_no_version(project: Project, trained: Path) -> None:
    add(project, trained)
    (project.root / "registry" / "digits" / "v1" / registry.LINEAGE).unlink()
    with pytest.raises(ConfigError, match=r"registry:digits: not in .*registry; register it with export\.register"):
        registry.find(project, "registry:digits")
    assert add(project, trained) == "registry:digits@v2"  # its folder is not replaced


@pytest.mark.parametrize("reference", ["registry:other", "registry:../digits@v1", "registry:digits@v9", "registry:@v1"])
def test_unknown_references(project: Project, trained: Path, reference: str) -> None:
    add(project, trained)
    with pytest.raises(ConfigError, match=r"^registry:.*(not in|no such version \(there are: v1\))"):
        registry.find(project, reference)
    with pytest.raises(ConfigError, match=r"export\.register=\.\./x: not a name"):
        add(project, trained, "../x")
    with pytest.raises(ConfigError, match=r"resume=registry:digits: registered runs do not continue"):
        registry.resolve(project, ["resume=registry:digits"])


def test_a_registered_run_is_evaluated_without_the_original(script: Script, tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "run", tmp_path / "elsewhere"
    done = script("train", *QUICK, "trainer.max_epochs=1", f"folder={folder}", f"checkpoints={checkpoints}")
    assert done.returncode == 0, done.stderr
    project = Project.find(__file__)
    env = {registry.VARIABLE: str(tmp_path / "registry")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(registry.VARIABLE, env[registry.VARIABLE])
        registry.register(project, "digits", folder, f"{checkpoints}/best.ckpt")
    shutil.rmtree(folder)
    shutil.rmtree(checkpoints)
    done = script("evaluate", "run=registry:digits@best", env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "registry" / "digits" / "v1" / "evaluation" / "test" / "metrics.json").is_file()
    done = script("evaluate", "run=registry:digits@v2", env=env)
    assert done.returncode == 2
    assert (
        done.stderr == "error: registry:digits@v2: no such version (there are: v1); use one of them, latest or best\n"
    )


@pytest.mark.parametrize("is_url", [False, True])
def test_files_that_have_changed_are_refused(
    project: Project, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_url: bool
) -> None:
    monkeypatch.setenv(registry.VARIABLE, f"file://{tmp_path}/shared" if is_url else f"{tmp_path}/shared")
    (tmp_path / "shared" / "digits").mkdir(parents=True)
    add(project, trained)
    place = tmp_path / "shared" / "digits" / "v1"
    use = ["run=registry:digits"]
    assert registry.resolve(project, use) == [f"run={'file://' if is_url else ''}{place}"]
    shutil.copytree(place, tmp_path / "kept")
    (place / "evaluation" / "new.csv").write_text("a")  # as by evaluate, which may add to a version
    (place / "report.html").write_text("a")
    assert registry.resolve(project, use)
    for name, message in (
        ("checkpoints/best.ckpt", "checkpoints/best.ckpt is not the file"),
        ("checkpoints/best-2.ckpt", "checkpoints/best-2.ckpt is not the file"),
        ("record.json", "record.json is not the file"),
    ):
        with open(place / name, "ab") as file:
            file.write(b" ")
        with pytest.raises(ConfigError, match=rf"^registry:digits: {message} that was registered; "):
            registry.resolve(project, use)
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "kept", place)
    lineage = json.loads((place / registry.LINEAGE).read_text())
    outside = {"checkpoints/../record.json": lineage["files"]["record.json"]}
    (place / registry.LINEAGE).write_text(json.dumps(lineage | {"files": lineage["files"] | outside}))
    with pytest.raises(ConfigError, match=r"checkpoints/\.\./record\.json is not the file"):
        registry.resolve(project, use)
    (place / registry.LINEAGE).write_text(json.dumps(lineage))
    for name in ("checkpoints/best.ckpt", "record.json"):
        (place / name).rename(place / "removed")
        with pytest.raises(ConfigError, match=rf"{name} is not the file"):
            registry.resolve(project, use)
        (place / "removed").rename(place / name)


def test_a_version_in_the_place_of_another_is_refused(project: Project, trained: Path) -> None:
    """Whoever may write to a shared registry can bring back an earlier version, or that of another model."""
    registered = project.root / "registry" / "digits" / "v1"
    add(project, trained)
    assert registry.resolve(project, ["run=registry:digits@v1"]) == [f"run={registered}"]
    for name, version in (("digits", "v2"), ("other", "v1")):
        shutil.copytree(registered, project.root / "registry" / name / version)
        with pytest.raises(
            ConfigError, match=r"you have signed the run, but not registered\.json of this version; set"
        ):
            registry.resolve(project, [f"run=registry:{name}@{version}"])


def test_a_better_score_than_the_signed_one_is_refused(project: Project, trained: Path) -> None:
    for _ in range(2):
        add(project, trained)
    use = ["run=registry:digits@best"]
    place = project.root / "registry" / "digits" / "v1"
    assert registry.resolve(project, use) == [f"run={place.parent / 'v2'}"]
    lineage = json.loads((place / registry.LINEAGE).read_text())
    lineage["best"]["score"] = {"max": 2.0, "min": -2.0}[lineage["best"]["mode"]]
    (place / registry.LINEAGE).write_text(json.dumps(lineage))
    with pytest.raises(ConfigError, match=r"not registered\.json of this version"):
        registry.resolve(project, use)
    lineage["signature"] = registry.trust.sign({key: lineage[key] for key in ("name", "version", "files")})  # as before
    (place / registry.LINEAGE).write_text(json.dumps(lineage))
    assert registry.resolve(project, use) == [f"run={place}"]


def test_a_version_of_wandb_is_refused_in_the_place_of_a_numbered_one(project: Project, trained: Path) -> None:
    add(project, trained)
    place = project.root / "registry" / "digits" / "v1"
    (place / registry.LINEAGE).unlink()
    registry.write_lineage(place, "digits", None, trained, str(place / "checkpoints" / "best.ckpt"))
    with pytest.raises(ConfigError, match=r"not registered\.json of this version"):
        registry.resolve(project, ["run=registry:digits@v1"])


def test_a_checkpoint_that_is_replaced_with_its_digest_is_refused(
    project: Project, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to a shared registry can change both, but cannot sign them."""
    add(project, trained)
    place = project.root / "registry" / "digits" / "v1"
    with open(place / "checkpoints" / "best.ckpt", "ab") as file:
        file.write(b" ")
    lineage = json.loads((place / registry.LINEAGE).read_text())
    lineage["files"]["checkpoints/best.ckpt"] = registry.sha256(place / "checkpoints" / "best.ckpt")
    for signature in (lineage.pop("signature"), None):
        (place / registry.LINEAGE).write_text(json.dumps({**lineage, "signature": signature}))
        with pytest.raises(
            ConfigError, match=r"you have signed the run, but not registered\.json of this version; set trust"
        ):
            registry.resolve(project, ["run=registry:digits@v1"])
    with monkeypatch.context() as patch:
        patch.setattr(trust, "_granted", True)
        assert registry.resolve(project, ["run=registry:digits@v1"]) == [f"run={place}"]
    record = json.loads((place / "record.json").read_text())  # now as registered by somebody else
    (place / "record.json").write_text(json.dumps(record | {"signature": None}))
    lineage["files"]["record.json"] = registry.sha256(place / "record.json")
    (place / registry.LINEAGE).write_text(json.dumps(lineage))
    assert registry.resolve(project, ["run=registry:digits@v1"]) == [f"run={place}"]


DAMAGED = [
    (b"[[]]", b'"min"', b"1.0"),
    (b'"a"', b"[]", b"1.0"),
    (b'"a"', b'"min"', b"[]"),
    (b'"a"', b'"min"', b"9" * 400),
]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"[" * 10**5, b'{"files": {}, "best": {"score": 1}}', b"\xff"),
        *(b'{"files": {}, "best": {"monitor": %s, "mode": %s, "score": %s}}' % facts for facts in DAMAGED),
        b'{"files": [], "best": {"monitor": "a", "mode": "min", "score": 1.0}}',
    ],
)
def test_a_damaged_lineage_ends_in_one_line(project: Project, trained: Path, content: bytes) -> None:
    add(project, trained)
    (project.root / "registry" / "digits" / "v1" / registry.LINEAGE).write_bytes(content)
    for which in ("@best", "@v1"):
        with pytest.raises(ConfigError, match=r"v1: registered\.json is damaged; use another version.*$") as error:
            registry.resolve(project, [f"run=registry:digits{which}"])
        assert "\n" not in str(error.value)


def test_files_that_are_none_and_names_that_leave_the_registry_are_refused(project: Project, trained: Path) -> None:
    add(project, trained)
    version = project.root / "registry" / "digits" / "v1"
    for name in (
        "v\N{FULLWIDTH DIGIT TWO}",
        "v01",
        "v-1",
        "v2 ",
        "v",
        "v1\n",
    ):  # the first has a digit of another script
        (version.parent / name).mkdir()
        (version.parent / name / registry.LINEAGE).write_text("{}")
    (version.parent / os.fsdecode(b"v\xff")).mkdir()
    assert registry.versions(str(version.parent)) == [1]
    lineage = json.loads((version / registry.LINEAGE).read_text())
    (project.root / "secret").write_text("a secret value")
    outside = {f"checkpoints/{'../' * depth}secret": registry.sha256(project.root / "secret") for depth in range(1, 6)}
    for name in ("digits/v1", "../registry/digits", "..", "digits@v1/..", "dígits", "digits\n", "a" * 5000):
        with pytest.raises(ConfigError, match=r"not in|no such version"):
            registry.resolve(project, [f"run=registry:{name}"])
    for change in outside:
        files = lineage["files"] | {change: outside[change]}
        (version / registry.LINEAGE).write_text(json.dumps(lineage | {"files": files}))
        with pytest.raises(ConfigError, match=r"is not the file that was registered"):
            registry.resolve(project, ["run=registry:digits"])
    checkpoint = version / "checkpoints" / "best.ckpt"
    (version / registry.LINEAGE).write_text(json.dumps(lineage))
    for replace in (
        lambda: None,
        lambda: os.mkfifo(checkpoint),
        lambda: checkpoint.symlink_to("/dev/zero"),
        lambda: checkpoint.symlink_to(checkpoint),
        checkpoint.mkdir,
    ):
        checkpoint.unlink()
        replace()
        with pytest.raises(ConfigError, match=r"best\.ckpt is not the file that was registered"):
            registry.resolve(project, ["run=registry:digits"])
        if checkpoint.is_dir():
            checkpoint.rmdir()
            checkpoint.touch()
        checkpoint.unlink(missing_ok=True)
        checkpoint.touch()


def test_a_registry_at_a_url(project: Project, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, f"file://{tmp_path}/shared")
    (tmp_path / "shared" / "digits").mkdir(parents=True)
    assert [add(project, trained) for _ in range(2)] == ["registry:digits@v1", "registry:digits@v2"]
    assert registry.find(project, "registry:digits@latest") == f"file://{tmp_path}/shared/digits/v2"
    assert (tmp_path / "shared" / "digits" / "v2" / "checkpoints" / "best.ckpt").is_file()


def test_an_upload_that_is_interrupted_is_no_version(
    project: Project, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(registry.VARIABLE, f"file://{tmp_path}/shared")
    place, upload, names = tmp_path / "shared" / "digits" / "v1", transfer.upload, list[str]()
    place.mkdir(parents=True)

    def interrupted(folder: Path, url: str, name: str) -> str:
        assert registry.versions(f"file://{tmp_path}/shared/digits") == []
        names.append(name)
        if name == registry.LINEAGE:
            raise OSError("interrupted")
        return upload(folder, url, name)

    monkeypatch.setattr(transfer, "upload", interrupted)
    with pytest.raises(ConfigError, match="interrupted"):
        add(project, trained)
    stored = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert {"record.json", "checkpoints/best.ckpt"} <= stored == {*names} - {registry.LINEAGE}
    assert names[-1] == registry.LINEAGE


def test_only_scores_of_the_same_metric_are_compared() -> None:
    lineages = [
        {"best": {"monitor": monitor, "mode": mode, "score": score}}
        for monitor, mode, score in (
            ("val/loss", "min", 0.2),
            ("val/loss", "min", 0.3),
            ("val/accuracy", "max", 0.9),
            ("val/accuracy", "max", 0.8),
            (None, None, None),
        )
    ]
    for odd in (None, 3, [], {"score": "x"}, {"score": 10**400}, {"score": float("nan")}):  # of another program
        assert registry.is_better(lineages[0], {"best": odd})
    better = [[registry.is_better(new, old) for old in lineages] for new in lineages]
    assert better == [
        [True, True, False, False, True],
        [False, True, False, False, True],
        [False, False, True, True, True],
        [False, False, False, True, True],
        [False, False, False, False, True],
    ]
