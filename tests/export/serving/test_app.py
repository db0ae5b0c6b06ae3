"""The page of the server, used in a browser."""

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Tab

from .conftest import Serve

Open = Callable[[str], Tab]
WHITE = "document.getElementById('canvas').getContext('2d').getImageData({x}, {y}, 1, 1).data[0]"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_digit_is_drawn_and_an_image_dropped(serve: Serve, trained: Path, open_tab: Open) -> None:
    tab = open_tab(serve(trained).url)
    tab.wait("document.getElementById('canvas')?.offsetParent != null")
    assert tab.evaluate("document.getElementById('h-input').innerText") == "Draw a digit"
    assert tab.evaluate("document.getElementById('canvas').ariaLabel") == "Drawing"
    left, top = tab.evaluate(
        "(({left, top}) => [left, top])(document.getElementById('canvas').getBoundingClientRect())"
    )
    tab.drag((left + 112, top + 30), (left + 112, top + 110), (left + 112, top + 190))
    assert tab.evaluate(WHITE.format(x=112, y=110)) == 255
    assert tab.wait("document.getElementById('class')?.textContent") in [str(digit) for digit in range(10)]
    shares = tab.evaluate(
        "[...document.querySelectorAll('#result i')].map(bar => bar.style.getPropertyValue('--share'))"
    )
    assert len(shares) == 10
    values = [float(share.removesuffix("%")) for share in shares]
    assert values == sorted(values, reverse=True)
    assert sum(values) == pytest.approx(100)
    tab.evaluate("document.getElementById('file').focus()")  # by the keyboard as well
    assert tab.evaluate("document.activeElement.id") == "file"
    tab.evaluate("document.getElementById('clear').click()")
    assert tab.evaluate(WHITE.format(x=112, y=110)) == 0
    assert tab.evaluate("document.getElementById('result').innerText") == ""
    drop = """new Promise(done => document.getElementById('canvas').toBlob(blob => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([NAME], 'image.png', {type: 'image/png'}));
        document.getElementById('drop').dispatchEvent(new DragEvent('drop', {dataTransfer: transfer, bubbles: true}));
        done(true);
    }))"""
    tab.evaluate(drop.replace("NAME", "blob"))
    tab.wait("document.getElementById('class')?.textContent")
    tab.evaluate(drop.replace("NAME", "'not an image'"))
    tab.wait("document.getElementById('error').textContent.startsWith('the image: not a valid PNG or JPEG image')")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_row_is_filled_in(serve: Serve, diabetes_run: Path, open_tab: Open) -> None:
    tab = open_tab(serve(diabetes_run, "data.fill_missing=true").url)
    tab.wait("document.querySelectorAll('#fields input').length == 10")
    tab.evaluate(
        "document.querySelectorAll('#fields input').forEach((input, i) => input.value = i || '')"
    )  # one is empty
    tab.evaluate("document.querySelector('#row button').click()")
    assert "value 1" in tab.wait("document.getElementById('result').innerText")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_prompt_is_continued(serve: Serve, text_run: Path, open_tab: Open) -> None:
    tab = open_tab(serve(text_run).url)
    tab.wait("document.getElementById('prompt')?.offsetParent != null")
    tab.evaluate("document.getElementById('prompt').value = 'Grüße'; document.getElementById('tokens').value = 30")
    tab.evaluate("document.querySelector('#text button').click()")
    assert tab.wait("(text => text.length > 10 && text)(document.getElementById('result').innerText)").startswith(
        "Grüße"
    )
    tab.evaluate("document.getElementById('tokens').value = 100000")
    tab.evaluate("document.querySelector('#text button').click()")
    tab.wait("document.getElementById('error').textContent == 'tokens=100000: at most 1000'")
