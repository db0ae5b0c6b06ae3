"""Trains the programs with the callback."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from boltcutter.diagnosis import CHECKS, Finding, Invariants
from programs import BUGS, Program, load_programs

load_programs()
# Those that no look at the real training can know, only an altered batch or the data; of six only a note tells.
NOTED = {
    "standardized_before_the_split",
    "half_input",
    "augmented_validation",
    "rows_misaligned",
    "weight_of_a_loss_is_zero",
    "equal_pairs_are_driven_apart",
}
PROBED = NOTED | {
    *("query_of_a_validation_is_in_its_support", "accuracy_counts_what_fills_sentences"),
    *("each_token_is_the_first", "sampler_passes_the_number_of_the_step", "known_items_are_ranked"),
    "controller_gets_what_is_not_standardized",
    *("places_are_not_flipped", "divergence_is_divided_by_batches"),
    *("mean_of_the_logarithms_of_scales", "noise_is_added_to_the_array", "first_category_is_padding"),
    *("overlap_of_what_is_above_a_threshold", "labels_of_crops_are_repeated", "average_in_a_callback_follows_at_once"),
    "rare_rows_are_copied_with_noise",
    *("accuracies_of_unequal_batches", "advantage_is_squared_by_hand", "argmax_over_columns"),
    *("averaged_model_is_never_evaluated", "codes_without_straight_through", "collate_sorts_two_of_three_parts"),
    *("column_of_errors_times_weights", "column_of_logarithms", "entropy_of_logits_is_minimized"),
    *("error_is_scaled_back_with_the_mean", "errors_are_never_emptied", "f1_of_batches_in_a_list"),
    *("graph_with_a_train_key", "hits_over_batches_times_size", "levels_of_the_file_are_reversed"),
    *("logarithm_of_another_base", "mean_is_divided_first", "mean_over_padded_tags", "nodes_of_the_batch_are_unread"),
    *("noise_times_its_variance", "overlap_is_a_term_without_minus", "probabilities_of_a_committee"),
    *("ratio_of_the_policy_to_itself", "risk_sets_of_earlier_times", "shares_of_each_sample_are_exchanged"),
    *("standardized_before_the_split", "target_follows_at_once", "thawed_by_a_callback"),
    *(
        "time_is_drawn_again",
        "weights_of_another_order",
    ),
    *("attention_over_batch", "batch_statistics", "broadcast_by_hand", "channels_flattened", "first_sample_for_all"),
    *("kl_of_probabilities", "label_as_feature", "labels_permuted", "no_causal_mask", "not_shifted"),
    *("pooled_over_batch", "positions_of_batch", "same_noise_in_workers", "scaled_in_place", "shuffled_before_split"),
    *("target_column", "time_major_logits", "view_not_transpose"),
    *("accuracy_of_column", "augmented_in_place", "average_never_updated", "bidirectional_language_model"),
    *("causal_convolution_centered", "cross_entropy_of_multi_hot", "heads_by_view", "kl_of_log_targets"),
    *("lstm_of_batches", "normal_of_column", "normalized_over_batch", "own_dropout_in_evaluation", "padding_attended"),
    *("patients_in_both", "poisson_of_rates", "predictions_sorted", "seeded_in_getitem", "segmentation_by_reshape"),
    *("bytes_wrap_around", "dice_of_argmax", "momentum_of_itself", "noise_drawn_twice", "observer_sees_validation"),
    *("penalty_without_its_graph", "risk_sets_not_sorted", "sampled_without_reparameterization"),
    *("seeded_in_each_step", "series_read_in_both_directions", "targets_as_integers"),
    *("attention_weights_over_the_batch", "last_sample_for_last_time", "target_is_never_copied"),
    *("mask_not_assigned", "auxiliary_loss_not_added", "plus_and_equal_exchanged"),
    *("normalization_dropped", "mask_never_passed", "noise_not_used", "hook_of_another_name"),
    *("loss_negated", "optimizer_maximizes", "likelihood_without_minus", "kl_of_wrong_sign"),
    *("weight_penalty_of_wrong_sign", "variance_for_deviation", "mask_inverted", "mask_not_read"),
    *("no_positions", "hidden_state_kept_between_batches", "mask_of_the_past", "classes_are_time"),
    *("self_similarity_kept", "labels_of_pairs_are_zero", "temperature_multiplied"),
    *("target_has_a_gradient", "end_of_episode_ignored", "decay_of_average_inverted"),
    *("smoothing_is_the_share_kept", "target_before_prediction", "label_is_a_column"),
    *("windows_split_at_random", "target_is_constant", "divided_by_255_twice", "validation_is_augmented"),
    *("metric_of_both_splits", "threshold_of_logits", "labels_sorted_in_collate"),
    *("same_order_in_each_epoch", "weights_of_samples_ignored", "siamese_without_detach"),
    *("target_network_never_copied"),
    *("index_is_ignored", "statistics_in_an_attribute", "rare_classes_drawn_less", "weights_are_the_counts"),
    *("padding_index_is_a_token", "loss_of_padding", "bytes_not_scaled", "income_beside_age"),
    *("validation_hook_of_another_name", "detach_without_assignment", "bidirectional_tagger_without_lengths"),
    *("one_hot_in_the_inputs", "rounded_logits"),
    *("mask_is_not_flipped", "rare_rows_copied_before_the_split", "wind_in_degrees", "labels_encoded_by_split"),
    *("mask_of_the_tokens", "decoder_beside_an_encoder_is_not_shifted", "hardest_negative_is_the_mask"),
    *("condition_is_dropped_for_most", "initialization_unties", "average_without_statistics"),
    *("each_split_has_its_own_scale", "derivative_without_its_graph", "penalty_of_data", "loss_of_all_nodes"),
    *("numbers_of_items_in_half_precision", "risk_sets_of_the_past", "softmax_over_the_queries"),
    *("determinant_of_the_inverse", "average_around_each_value", "windows_less_their_last_value"),
    *("loss_of_the_last_task", "quantiles_exchanged", "end_of_episode_in_a_tuple_ignored", "box_is_not_flipped"),
    *("softmax_over_bags",),
    *("end_of_episode_ignored_in_a_method", "rare_class_is_copied_to_balance_before_the_split"),
    *("picture_viewed_in_the_dataset", "views_with_one_seed", "views_with_one_seed_in_one_pass", "padding_is_a_tag"),
    *("lengths_are_never_read", "edges_of_all_graphs_are_those_of_the_first"),
    *("difference_of_bytes", "difference_of_bytes_of_tensors", "area_under_the_curve_of_labels", "targets_are_rated"),
    *("determinants_of_all_samples", "views_of_neighbours", "messages_along_edges_of_validation"),
    *("query_is_in_its_support", "weights_in_the_order_of_sizes", "rare_class_weighs_less"),
    *("numbers_of_topics_by_split", "decoder_gets_what_it_predicts", "attention_over_what_fills"),
    *("samples_and_noise_without_roots", "trained_network_follows_its_target"),
    *("derivative_of_all_outputs", "items_beside_ratings_in_half_precision"),
    *("state_with_a_prefix_is_not_loaded", "scans_of_patients_in_both", "users_are_numbered_in_each_split"),
    *("area_of_centers_and_sides", "mask_with_an_own_token_is_inverted", "last_state_after_the_padding"),
    *("error_of_pixels_is_a_mean", "temperature_of_similarities_is_a_factor", "each_sample_has_the_same_noise"),
    *("weights_after_the_mean", "masks_are_interpolated", "features_are_kept_by_batch", "who_left_counts_as_dead"),
    *("loaded_weights_are_drawn_again", "shops_are_encoded_by_all_their_sales"),
    *("rows_and_labels_are_shuffled_apart",),
    *("error_of_logarithms_and_values", "noise_is_predicted_with_the_digits", "gaps_are_predicted_with_the_digits"),
    *("inputs_are_mixed_and_labels_are_not", "generator_is_trained_to_be_found_out", "focal_loss_of_easy_samples"),
    *("triplet_has_the_other_class_first", "rate_and_decay_are_exchanged", "mean_and_deviation_are_exchanged"),
    *(
        "deviation_for_the_variance",
        "variance_for_the_deviation_of_a_distribution",
        "gradients_are_clipped_after_the_step",
    ),
    *("state_is_drawn", "several_labels_share_a_softmax", "first_of_several_labels_is_compared"),
    *("second_number_is_passed_and_not_read", "accuracy_of_the_last_batch", "mean_over_what_is_masked"),
    *("mask_multiplies_scores", "validation_leaves_a_batch_out", "validation_is_drawn"),
    *(
        "best_weights_are_those_that_change",
        "average_beside_the_module_has_no_statistics",
        "number_of_a_user_is_padding",
    ),
    *("mask_of_an_object_is_not_read", "mask_is_read_for_a_metric_only", "bytes_are_reshaped_in_the_dataset"),
    *("array_is_reshaped_before_the_dataset", "numbers_beside_categories_are_scaled_by_split"),
    *("each_split_has_its_own_range", "windows_are_standardized_with_their_targets"),
    *("soft_labels_are_mixed_with_other_samples", "messages_are_added_in_place"),
    *("messages_are_put_without_accumulate", "passes_with_dropout_are_equal", "one_pass_of_copies_is_equal"),
    *("labels_are_copied_after_masking", "gaps_are_the_targets_of_gaps", "convolution_is_cut_at_the_wrong_end"),
    *("last_time_is_that_of_the_padding", "sizes_are_added_in_a_dataset"),
    *("one_batch_of_each_epoch", "quantile_of_a_layer_has_the_wrong_sign"),
    *("labels_are_mixed_with_other_samples", "returns_are_in_reverse_order"),
    *("times_in_few_digits", "value_of_each_return", "metric_of_each_batch_by_another_name"),
    *("times_in_few_digits", "gradients_are_clipped_to_a_thousandth", "rates_of_body_and_head_are_exchanged"),
    *("second_schedule_has_the_first_optimizer",),
    *("pixels_are_normalized_as_bytes", "noise_is_multiplied_by_the_logarithm", "divergence_gets_the_deviation"),
    *("end_of_episode_is_inverted", "ratio_of_policies_is_inverted", "policy_without_minus"),
    *("distribution_of_a_policy_without_minus", "numpy_is_seeded_in_getitem"),
    *("entropy_of_the_policy_is_added_to_the_loss", "weights_of_mixed_labels_are_exchanged"),
    *("average_is_never_evaluated", "accuracy_is_divided_by_batches_of_equal_size"),
    *("length_is_that_of_batches", "vocabulary_has_other_capitals"),
    *("overlap_is_added_to_the_loss", "optimizer_of_the_generator_has_the_critic"),
    *("statistics_are_not_persistent", "state_is_detached_at_each_time"),
    *("pixels_that_are_not_masked_are_predicted", "tokens_that_are_not_masked_are_predicted"),
    *("tokens_are_shifted_twice", "transform_of_a_shared_dataset"),
    *("returns_are_those_of_the_past",),
    *("teacher_has_no_temperature", "queue_has_the_positives"),
    *("epoch_is_set_in_the_dataset_of_persistent_workers", "penalty_is_a_sum_of_numbers"),
    *("softmax_over_the_heads", "number_of_the_row_is_a_column"),
    *("predictions_are_scaled_back_without_the_mean", "next_state_is_not_read"),
    *("dropout_is_not_read", "rate_is_not_read"),
    *("weights_of_classes_are_kept_and_not_read",),
    *("missing_values_are_minus_one", "missing_values_are_in_a_difference", "length_is_that_of_the_first_sample"),
    *("length_is_that_of_the_first_path", "targets_alone_are_softened", "targets_of_a_product_are_softened"),
    *("probabilities_of_the_student_are_softened", "divergence_is_divided_by_the_classes"),
    *("divergence_of_all_places_is_averaged", "penalty_is_computed_without_gradients", "penalty_is_a_number"),
    *("penalty_is_computed_by_numpy", "entropy_is_a_number", "stacked_penalty_has_no_gradient"),
    *("dropout_is_passed_by", "activation_is_overwritten", "normalized_values_are_passed_by"),
    *("reversal_passes_gradients_on", "rows_of_a_store_are_copied", "rows_of_a_store_are_filled_by_two_indices"),
    *("peak_of_bytes", "peak_of_bytes_of_each_sample", "grades_are_at_least_their_level", "clients_are_one_network"),
    *("future_begins_in_the_window", "future_of_two_channels_begins_in_the_window", "first_word_is_padding"),
    *("anchor_is_the_trained_weights", "anchors_in_a_list_are_the_trained_weights", "adapted_weights_are_unused"),
    *("condition_that_is_left_out_is_unused", "metric_has_a_peak_of_bytes", "slices_of_patients_in_both"),
    *("tanh_of_unscaled", "teacher_forcing_in_validation", "validated_on_training_data", "window_has_its_target"),
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
