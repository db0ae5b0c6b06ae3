import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.config.settings import Settings
from boltcutter.config.values import (
    as_yaml,
    flatten,
    format_value,
    is_map,
    last_of_each,
    leaves,
    name_missing_files,
    parse,
    paths,
    plain,
    raw_node,
    read_yaml,
    resolve_reference,
    resolved,
    resolved_texts,
    split_overrides,
    split_values,
)


@pytest.fixture
def cfg() -> DictConfig:
    return OmegaConf.create({"x": 1, "m": {"k": 1, "shape": "${x}"}, "uses": "${m}", "list": [{"y": "${uses}"}]})


@pytest.fixture
def chained(cfg: DictConfig) -> DictConfig:
    return OmegaConf.merge(cfg, {"again": "${uses}", "partly": "a ${m.k}"})  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ""),
        ("1", 1),
        ("-2", -2),
        ("007", "007"),
        ("1_000", 1000),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("5.", 5.0),
        ("+3", 3),
        ("0", 0),
        ("1_0_0", 100),
        ("1__0", "1__0"),
        ("00.5", "00.5"),
        ("0.5", 0.5),
        ("-1.5E+3", -1500.0),
        ("2e3", 2000.0),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        (".nan.", ".nan."),
        ("false", False),
        ("FALSE", False),
        ("inf", "inf"),
        ("1.2.3", "1.2.3"),
        ("True", True),
        ("yes", "yes"),
        ("null", None),
        ("None", "None"),
        ("'8'", "8"),
        ('"a, b"', "a, b"),
        ("a,b", "a,b"),
        ("2026-11-21", "2026-11-21"),
        ("12:30", "12:30"),
        ("[1,a,[2.5]]", [1, "a", [2.5]]),
        ("[]", []),
        ("{a: 1, b: {c: null}}", {"a": 1, "b": {"c": None}}),
        ("a: b # c", "a: b # c"),
    ],
)
def test_a_formatted_value_parses_to_itself(text: str, value: Any) -> None:
    read = parse("x", text)
    plain = OmegaConf.to_container(read) if OmegaConf.is_config(read) else read
    assert plain == value
    assert type(plain) is type(value)
    again = parse("x", format_value(value))
    assert (OmegaConf.to_container(again) if OmegaConf.is_config(again) else again) == value


@pytest.mark.parametrize("text", ["[1", "[" * 1500, "{a: " * 1500, "[*a]", "[&a [*a]]"])
def test_a_list_that_cannot_be_read_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^x: cannot read [^\n]*; quote it for the shell, as in 'x=\[1,2\]'$"):
        parse("x", text)


def test_nan_is_written_as_it_is_read() -> None:
    assert math.isnan(parse("x", ".nan"))
    assert format_value(float("nan")) == ".nan"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, "a", (2.5, None)], "[1,a,[2.5,null]]"),
        ({"a": True, "b": [False]}, "{a: true, b: [false]}"),
        (float("-inf"), "-.inf"),
        (float("inf"), ".inf"),
        ("true", "'true'"),
        ("8", "'8'"),
        ("[a", "'[a'"),
        ("{a", "'{a'"),
        ("'a", '"\'a"'),
        ('"a', "'\"a'"),
        ("a[", "a["),
        ("None", "None"),
    ],
)
def test_values_are_formatted_for_the_command_line(value: Any, text: str) -> None:
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a, b ,c", ["a", "b", "c"]),
        ("", [""]),
        ("[1,2],{x: 1, y: 2},f(1, 2)", ["[1,2]", "{x: 1, y: 2}", "f(1, 2)"]),
        ("[[1,2],3],4", ["[[1,2],3]", "4"]),
        ("'a,b',\"c,'d\",e", ["'a,b'", '"c,\'d"', "e"]),
        ("'[',a,']'", ["'['", "a", "']'"]),
        ("a'b,c'd,e", ["a'b,c'd", "e"]),
        ("X,Y", ["X", "Y"]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_the_last_override_of_a_key_is_kept() -> None:
    assert last_of_each(["a=1", "+b=x=y", "++a=2", "~c", "b=3"]) == ["++a=2", "b=3", "~c"]


def test_leaves_are_the_nodes_of_values(cfg: DictConfig) -> None:
    nested = OmegaConf.create({"a": {"b": [1, {"c": [2, 3]}], "none": None, "missing": "???"}, "list": "${a.b}"})
    found = [(key, node._value()) for key, node in leaves(nested)]
    assert found == [
        ("a.b", 1),
        ("a.b.c", 2),
        ("a.b.c", 3),
        ("a.none", None),
        ("a.missing", "???"),
        ("list", "${a.b}"),
    ]
    assert [key for key, _ in leaves(cfg)] == ["x", "m.k", "m.shape", "uses", "list.y"]


@pytest.mark.parametrize("text", ["[1", "{a: 1", "'a", "[${]"])
def test_a_value_that_is_not_yaml_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse("m.k", text)
    assert str(error.value).startswith(f"m.k: cannot read {text}; quote it ")


def test_values_are_flattened_to_dotted_keys() -> None:
    nested = {"a": {}, "b": {"c": 1, "d": {"e": None}}, "f": []}
    assert flatten(nested) == [("a", {}), ("b.c", 1), ("b.d.e", None), ("f", [])]
    for value in ({}, 3):
        assert flatten(value, "key") == [("key", value)]


def test_only_nodes_with_keys_are_maps() -> None:
    maps = OmegaConf.create({"a": {}, "none": None, "missing": "???", "list": [1], "uses": "${a}"})
    assert {key for key in maps if is_map(raw_node(maps, key))} == {"a"}
    assert raw_node(maps.list, 0) is None
    for content in (None, "???", "${a}"):
        assert not is_map(DictConfig(content))
        assert [key for key, _ in leaves(OmegaConf.create({"x": ListConfig(content)}))] == ["x"]
    assert raw_node(maps, "nope") is None


def test_paths_do_not_follow_references(cfg: DictConfig) -> None:
    assert list(paths(cfg)) == ["x", "m", "m.k", "m.shape", "uses", "list"]


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("uses.k", "m.k"),
        ("again.shape", "x"),
        ("again.other.deep", "m.other.deep"),
        ("partly.k", "partly.k"),
        ("uses.shape", "x"),
        ("uses", "m"),
        ("m.k", "m.k"),
        ("nothing.there", "nothing.there"),
    ],
)
def test_resolve_reference(chained: DictConfig, path: str, target: str) -> None:
    assert resolve_reference(chained, path) == target


def test_plain_keeps_references_and_resolved_replaces_them(cfg: DictConfig) -> None:
    assert plain(cfg)["uses"] == "${m}"
    found = resolved(cfg)
    assert found == {"x": 1, "m": {"k": 1, "shape": 1}, "uses": {"k": 1, "shape": 1}, "list": [{"y": found["uses"]}]}
    assert type(found["uses"]) is dict


def test_redacted_masks_secrets_and_all_that_refers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "planted")
    found = Settings({"api_key": "${oc.env:SERVICE_TOKEN}", "header": "Basic ${api_key}", "size": 3}).redacted
    assert found == {"api_key": "***", "header": "Basic ***", "size": 3}


@pytest.mark.parametrize(
    ("values", "setting", "remedy"),
    [
        ({"m": {"k": "???"}, "x": "${m.k}"}, "m.k: ", "m.k=…"),
        ({"x": "${oc.env:NO_SUCH_PLACE}"}, "x: ", "export NO_SUCH_PLACE=…"),
        ({"width": 1, "x": "${widht}"}, "x: ${widht} ", "width"),
        ({"x": "${nothing.like.it}"}, "x: ${nothing.like.it} ", "set x=…"),
        ({"x": "${no_such_resolver:1}"}, "x: ", "no_such_resolver"),
        ({"width": 1, "x": "${zzzz}"}, "x: ${zzzz} refers to nothing; ", "set x=…, or add zzzz"),
        ({"x": "${paths.log_dir}"}, "x: ${paths.log_dir} refers to nothing; ", "write ${runs}"),
        ({"x": "${extras.y}"}, "x: ${extras.y} refers to nothing; ", "leave it out"),
        ({"x": "${hydra:runtime.output_dir}"}, "x: ", "; write ${folder}"),
        (
            {"x": "${own:1}"},
            "x: ",
            "; register own in the module that resolvers of [tool.boltcutter] in pyproject.toml",
        ),
        ({"x": "${now:%Y}"}, "x: ", "; leave it out"),
        ({"m": {"k": 1}, "x": "${m.k.deep}"}, "x: ", "m.k"),
        ({"model": {"width": 1}, "x": "${model.width.max}"}, "x: ${model.width.max} ", "did you mean model.width?"),
    ],
)
def test_a_reference_to_nothing_is_reported_in_one_line(values: dict[str, Any], setting: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(OmegaConf.create(values))
    text = str(error.value)
    assert text.startswith(setting)
    assert remedy in text
    assert "\n" not in text


def test_yaml_keeps_the_order_of_keys() -> None:
    text = as_yaml({"b": [1, None], "a": {"c": "x: y"}})
    assert OmegaConf.create(text) == {"b": [1, None], "a": {"c": "x: y"}}
    assert text.index("b:") < text.index("a:")


def test_split_overrides() -> None:
    special, rest = split_overrides(["run=a", "x.run=b", "ckpt=e=3.ckpt", "~y"], "run", "ckpt")
    assert special == {"run": "a", "ckpt": "e=3.ckpt"}
    assert rest == ["x.run=b", "~y"]


def test_texts_are_resolved_unless_they_only_name_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_DIR", "home")
    references = {"joined": "${b}/c", "variable": "${oc.env:USER_DIR}", "mixed": "${oc.env:USER_DIR}/runs"}
    failing = {"gone": "${nothing}", "loop": "${loop}", "unknown": "${resolver:1}"}
    values = {"b": "d", **failing, **references, "list": ["${b}"]}
    assert list(resolved_texts(values)) == ["d/c", "home/runs", "d"]
    assert list(resolved_texts(["${b}"])) == []
    with pytest.raises(ConfigError, match=r"^no viable alternative at input .*; correct the reference$"):
        list(resolved_texts({"a": "${"}))


@pytest.mark.parametrize(
    ("path", "setting"),
    [
        ("/data/a.csv", "data.path=/data/a.csv: no such file"),
        ("/data/b/c.txt", "model.root=/data/b: /data/b/c.txt: no"),
    ],
)
def test_a_missing_file_is_named_with_the_setting_that_has_its_path(path: str, setting: str) -> None:
    cfg = {"data": {"path": "/data/a.csv"}, "model": {"root": "/data/b", "more": ["x", 1]}, "folder": "/"}
    with pytest.raises(ConfigError) as found, name_missing_files(cfg), as_config_error():
        Path(path).read_text()
    assert str(found.value).startswith(setting)
    assert "Errno" not in str(found.value)


def test_a_missing_file_of_no_setting_is_one_line() -> None:
    with (
        pytest.raises(ConfigError) as found,
        name_missing_files({"data": {"path": "b"}}),
        as_config_error(),
    ):
        Path("/nothing/here").read_text()
    assert str(found.value) == "/nothing/here: no such file or directory"
    with pytest.raises(ValueError, match=r"^other$"), name_missing_files({}):
        raise ValueError("other")


@pytest.mark.parametrize("is_file", [True, False])
def test_aliases_that_multiply_are_refused(is_file: bool) -> None:
    """Nine levels of ten aliases would be a billion values, in a file of 300 characters."""
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    for text in ("{a0: &a0 [1, 2], " + ", ".join(levels) + "}", "a: &a [1, *a]", "a: &a {b: *a}"):
        with pytest.raises(yaml.YAMLError, match="its aliases"):
            read_yaml(text, is_file=is_file)
    assert read_yaml("{a: &a [1, 2], b: *a, c: {d: *a}}", is_file=is_file) == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"d": [1, 2]},
    }
    with pytest.raises(ConfigError, match=r"^a: cannot read"):
        parse("a", "[&a [1, *a]]")


@pytest.mark.parametrize("text", ["[${seed},32]", "[1, ${a.b}]"])
def test_a_reference_in_a_list_is_to_be_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match=r"quote the reference inside, as in 'x=\[\"\$\{[\w.]+\}\"\]'$"):
        parse("x", text)


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 60 + "]" * 60, "a: " + "[" * 5000, "\n".join(" " * n + "a:" for n in range(60))]
)
def test_yaml_that_is_nested_deeply_is_an_error_of_yaml(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)
    assert read_yaml("a: " + "[" * 40 + "]" * 40)
