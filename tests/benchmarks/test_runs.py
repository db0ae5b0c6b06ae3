import json
import random
from pathlib import Path

import httpx
import pytest
from benchmarks.runs import PATHS, Page, cost
from conftest import Script


def turns(seconds: float, count: int) -> list[dict[str, float]]:
    return [{"cpu": seconds} for _ in range(count)]


def test_the_cost_is_that_of_a_question_each_second() -> None:
    found = [{"followed": turns(0.012 + 1e-5 * k, 2), "alone": turns(0.01 + 1e-5 * k, 50)} for k in range(9)]
    ratio = cost(found, steps=2)
    assert ratio.value == pytest.approx(1.008)  # 2 turns of 2 steps, each 2 ms longer
    assert ratio.spread == pytest.approx((1.008, 1.008))
    assert ratio.met
    draw = random.Random(0)
    found = [{"followed": turns(draw.gauss(0.1, 0.02), 3), "alone": turns(draw.gauss(0.1, 0.02), 9)} for _ in range(99)]
    low, high = cost(found, steps=1).spread
    assert low < 1 < high < low + 0.1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_is_followed(script: Script, tmp_path: Path) -> None:
    done = script("bench", "runs", "asks=6", "steps=10", "seconds=60", f"folder={tmp_path}", fresh=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs.json").read_text())
    (ratio,) = found["ratios"]
    assert ratio["target"] == 1.01
    assert 0.5 < ratio["spread"][0] <= ratio["value"] <= ratio["spread"][1] < 2
    assert all(each["followed"] and len(each["alone"]) >= len(each["followed"]) for each in found["details"])


def test_the_page_sends_the_token_that_the_server_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get(url: str, headers: dict[str, str], **_: object) -> httpx.Response:
        asked.append((url, headers["Authorization"]))
        return httpx.Response(200, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    page = Page("http://127.0.0.1:8010/?token=abc")
    page.start()
    page.ask()
    assert page.is_answered.wait(10)
    assert (page.error, asked) == ("", [(f"http://127.0.0.1:8010{path}", "Bearer abc") for path in PATHS])
