import yaml

from boltcutter_scaffold.port_lht import callback_file, entries, with_references, without


def test_references() -> None:
    text = "# @package _global_\na: ${model.net}\nb: ${hydra:runtime.output_dir}/x\nc: ${models.x}\nd: ${k}${k2}\n"
    assert with_references(text, ["k"]) == "a: ${task.net}\nb: ${folder}/x\nc: ${models.x}\nd: ${constants.k}${k2}\n"


def test_a_removed_key_takes_what_is_below_it() -> None:
    text = "a: 1\nb:\n  c: 2\n\n  d: 3  # kept with b\ne:\n- 1\n- 2\nf: 4\n"
    assert without(text, "b", "e") == "a: 1\nf: 4\n"


def test_entries_of_a_defaults_list() -> None:
    values = yaml.safe_load(
        "defaults: [base.yaml, _self_, {override /model: x}, {optional local: y}, {/hydra/launcher: z}, {logger: null}]"
    )
    assert entries(values, "experiment") == [("base", ""), ("task", "x"), ("logger", "null")]


def test_callbacks_that_others_include_do_not_repeat_the_built_in_ones() -> None:
    text = "swa:\n  _target_: lightning.pytorch.callbacks.StochasticWeightAveraging\n"
    assert "defaults" not in yaml.safe_load(callback_file(text, "swa", {"swa"}))
    assert yaml.safe_load(callback_file(text, "swa", set()))["defaults"] == ["default"]
