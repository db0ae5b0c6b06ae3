"""Names of files in the folder of a run or a search, and in that of all runs, for all that write or read them."""

RECORD = "record.json"  # what the run is, signed: configuration, status, metrics, commit, attempts
CONFIG = "config.yaml"  # the same configuration, for people
METRICS = "metrics.csv"
REPORT = "report.html"
LABELS = "labels.json"  # tags and a note that a user has added
BUNDLE = "job.tar.gz"  # code of a job that trains elsewhere
SEARCH = "search.json"  # what a search is, signed
STUDY = "study.log"  # journal of the trials of a search
TRIALS = "trials.csv"
FOLDERS = ".folders"  # in the folder of all runs: those that were launched elsewhere
# Columns of metrics.csv that are no metrics of training, by how their names begin.
NO_METRICS = ("step", "epoch", "throughput/", "test/", "test_")
