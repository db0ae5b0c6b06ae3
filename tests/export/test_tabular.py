import numpy as np
import pandas as pd
import torch

from boltcutter.data.tabular import compute_statistics, encode_features
from boltcutter.export.tabular import TableEncoder, describes_table


def test_rows_are_encoded_as_by_the_data_module() -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "height": rng.normal(170, 10, 50),
            "color": rng.choice(["red", "green", "blue"], 50),
            "time": 1.7e9 + rng.normal(0, 1, 50),  # too large for float32
            "size": rng.choice(["s", "m"], 50),
        }
    )
    statistics = compute_statistics(table, "table")
    table.loc[3, "height"], table.loc[4, "color"], table.loc[5, "size"] = np.nan, "black", None
    features = encode_features(table, statistics, "table")
    encoder = TableEncoder(statistics)
    codes = {
        name: {text: code for code, text in enumerate(values)} for name, values in statistics["categories"].items()
    }
    raw = table.assign(**{name: table[name].map(lookup).fillna(-1) for name, lookup in codes.items()})
    rows = torch.from_numpy(raw.to_numpy(np.float64))
    assert torch.equal(encoder(rows), features)
    assert torch.equal(encoder(encoder.invert(features)), features)
    assert torch.allclose(encoder.invert(features)[:3], rows[:3], rtol=1e-6)
    assert describes_table(statistics)
    assert not describes_table({"tokenizer": "bytes"})
