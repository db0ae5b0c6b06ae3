"""Trains the programs with the callback."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from boltcutter.diagnosis import CHECKS, Finding, Invariants
from programs import BUGS, Program, load_programs

load_programs()
# Of these only a note of a trial tells.
NOTED = {
    "standardized_before_the_split",
    "half_input",
    "augmented_validation",
    "rows_misaligned",
    "weight_of_a_loss_is_zero",
    "equal_pairs_are_driven_apart",
    "losses_are_kept_with_their_graphs",
}
# Also those whose check decides in a training, too, but here only in a trial.
PROBED = NOTED | {
    *("accuracy_of_column", "broadcast_by_hand", "clients_are_one_network", "codes_without_straight_through"),
    *("column_of_errors_times_weights", "column_of_logarithms", "errors_are_never_emptied"),
    *("gradients_are_clipped_to_a_thousandth", "kl_of_log_targets", "kl_of_probabilities", "loss_of_padding"),
    *("mean_over_padded_tags", "normal_of_column", "own_dropout_in_evaluation", "padding_is_a_tag"),
    *("poisson_of_rates", "probabilities_of_a_committee", "state_is_detached_at_each_time", "tanh_of_unscaled"),
    *("thawed_by_a_callback", "value_of_each_return", "layers_between_are_left_out"),
    *("schedule_of_epochs_by_hand", "cosine_of_epochs_by_hand", "schedule_asks_the_trainer"),
    *("rewards_minus_a_column_of_values",),
}
# One program for each check, and the correct ones that are nearest to an alarm.
QUICK = {
    *("layers_in_list", "layer_made_late", "no_grad_backbone", "wrong_branch", "leaf_loss", "zero_init", "temperature"),
    *("dying_relu", "nll_of_logits", "double_sigmoid", "softmax_permuted", "softmax_of_one", "labels_one_two"),
    *("broadcast_mse", "sigmoid_of_large", "functional_dropout", "zero_grad_overridden", "manual_not_cleared"),
    *("cleared_in_hook", "optimizer_of_other", "cosine_per_epoch", "divided_twice", "bf16_weights", "rate_in_percent"),
    *("frozen_decays", "eval_after_samples", "train_in_validation", "bn_momentum_zero", "sorted_not_shuffled"),
    *("val_not_scaled", "metric_not_reset", "stops_at_worst", "nan_batches_skipped", "nan_to_num"),
    *("plain_mlp", "convnet", "byol", "experts", "linear_probe", "bitfit", "mc_dropout", "tied_weights", "lbfgs"),
    *(
        "head_from_epoch_9",
        "thaw_later",
        "finetuning_callback",
        "manual_accumulation",
        "gan",
        "wgan_gp",
        "warm_up_long",
    ),
    *("sharpness_aware", "lora", "bf16_true", "small_rate", "metrics"),
    *("labels_permuted", "no_causal_mask", "pooled_over_batch", "scaled_in_place", "shuffled_before_split"),
    *("average_never_updated", "first_class_ignored", "generator_detached", "padding_attended", "rounded_activations"),
    *("one_block_four_times", "schedule_called_twice", "blank_is_a_label", "hook_in_each_step", "tied_by_data"),
    *("targets_as_integers", "dice_of_argmax", "mask_is_not_flipped", "labels_encoded_by_split", "mask_of_the_tokens"),
    *("hardest_negative_is_the_mask", "initialization_unties", "schedule_returns_the_rate", "penalty_of_data"),
    *("cleared_for_each_micro_batch", "average_without_statistics", "each_split_has_its_own_scale"),
    *("softmax_over_the_queries", "adversary_of_each_other_batch", "first_order_inner_steps", "sequential_schedule"),
    *("soft_actor_critic", "token_in_no_group", "weights_of_classes"),
}


def cases(programs: dict[str, Program]) -> list[Any]:
    """The programs, most of which are slow together."""
    return [pytest.param(p, id=n, marks=() if n in QUICK else pytest.mark.slow) for n, p in programs.items()]


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{"max_epochs": 3, **options},
    )


def find(program: Program, folder: Path, watch: Invariants | None = None) -> list[Finding]:
    """Train the program with the callback."""
    watch = watch or Invariants()
    L.seed_everything(0, verbose=False)
    module, train, val = program.make()
    path = None
    if program.resume:
        first = trainer_of(folder, max_epochs=1)
        first.fit(module, train, val)
        first.save_checkpoint(path := folder / "a.ckpt")
        module, train, val = program.make()
    trainer_of(folder, *program.callbacks(), watch, **program.trainer).fit(module, train, val, ckpt_path=path)
    assert not [f for f in watch.findings if "could not be decided" in f.text or "no longer looks" in f.text]
    return watch.findings


def modules_of(program: Program) -> set[str]:
    """The modules of ``diagnosis`` whose checks name the bug."""
    return {c.decide.__module__.rpartition(".")[2] for name in program.expect for c in CHECKS.get(name, ())}


def is_probed(program: Program) -> bool:
    """Whether only a trial names the bug."""
    moments = {c.at for name in program.expect for c in CHECKS.get(name, ())}
    return program.name in PROBED or moments <= {"probe", "trial", "data"}


def bugs_of(module: str, *, probed: bool = False) -> list[Any]:
    """The programs whose bug a check of one module of ``diagnosis`` names, in a training or only by a trial."""
    return cases({n: p for n, p in BUGS.items() if module in modules_of(p) and is_probed(p) == probed})


def assert_named(program: Program, folder: Path, watch: Invariants | None = None) -> None:
    """One of the right checks names the bug."""
    found = [f.check for f in find(program, folder, watch) if f.level != "note" or program.name in NOTED]
    assert set(found) & set(program.expect), found
