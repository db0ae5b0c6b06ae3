"""What the search of hyperparameters adds to Boltcutter."""

from boltcutter.extend import Command, Part

PART = Part(
    name="boltcutter_search",
    commands={
        "search": Command(
            "boltcutter_search.command:main",
            """Search hyperparameters, or repeat over seeds and folds: boltcutter search search=… [overrides of train]

boltcutter search search=optuna search.space.optimizer.lr='loguniform(1e-4, 1e-1)'
boltcutter search search=asha experiment=mnist search.num_trials=50
boltcutter search search=optuna budget=30m                          # ends after 30 minutes
boltcutter search search=kfold search.folds=10
boltcutter search resume=runs/…""",
            flags="boltcutter_search.command:FLAGS",
            config="boltcutter_search.plan:read_config",
            resolves_runs=False,  # trials resolve their own
        ),
    },
    groups=("search",),
    callbacks="boltcutter_search.trial_callback:trial_reporter",
    offers={
        "check_fold": "boltcutter_search.folds:check_fold",
        "search_array": "boltcutter_search.slurm_array:launch_search",
    },
)
