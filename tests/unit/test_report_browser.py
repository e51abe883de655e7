"""report in headless Chromium: nothing fails or is loaded, nothing overflows, both colour schemes, print, no script."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plan_example import example_plan

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.report import render_report
from tapeout.compiler.spec import load_spec
from tapeout.compiler.views import load_plan
from tapeout.passes import PIPELINE

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(FOUND is None, reason="needs Chromium: apt-get install chromium")

ROOT = Path(__file__).parents[2]
WIDTHS = (360, 1280)


def long_plan() -> dict[str, Any]:
    """The example with the long names of GPU kernels and of deep modules, and with every kind of segment."""
    plan = example_plan()
    name = "model.layers.{}.self_attn.compressor.indexer.entries.extraordinarily_long_projection_name"
    for layer in range(24):
        op = name.format(2 * layer)
        kernel = "gemv_q4_1_n1536_k576_m1_silu_norm_f32_bf16_r1s1w16d2_4f9a8b7c6d5e4f3a2b1c"
        args = {"w": ["weight", "model.norm"], "n": 1_048_576, "k": 16_384}
        launch = {"kernel": kernel, "op": op, "args": args, "grid": [65535, 64, 2]}
        plan["graphs"][1]["launches"].append(launch)
        plan["decisions"].append(plan["decisions"][0] | {"subject": op, "choice": kernel, "reason": "x" * 90})
        plan["weights"].append(plan["weights"][1] | {"name": op})
    kinds = ("self_attn.o_proj", "mlp.experts.up", "mlp.up", "lm_head", "hc.fn")
    for kind in kinds:
        axes = ["vocab" if kind == "lm_head" else "heads", "hidden"]
        plan["weights"].append(plan["weights"][1] | {"name": f"model.layers.0.{kind}.more", "axes": axes})
    caches = [f"model.layers.0.cache_{n}" for n in range(5)]
    plan["memory"]["max_sequences"] = 1
    plan["memory"]["kv"]["caches"] = [{"name": n, "page_bytes": 16_384, "sequence_bytes": 0} for n in caches]
    return plan


def large_plan(folder: Path, expert: int) -> dict[str, Any]:
    """Eight ranks of 61 layers with 384 experts, planned from a configuration; each rank with 384 / expert experts."""
    spec = load_spec(ROOT / "specs" / "kimi-k2.5-int4-8x-rtx-pro-6000.yaml", [f"topology.parallel.expert={expert}"])
    compile_spec(spec, folder / f"{expert}.json", plan_only=True)
    return load_plan(folder / f"{expert}.json")


SCRIPT = "<script>document.title = 'hit'</script>\"'><img src=x onerror=\"document.title = 'hit'\">"


def hostile(value: Any) -> Any:
    """A plan with a script behind every text."""
    if isinstance(value, dict):
        return {name: hostile(child) for name, child in value.items()}
    if isinstance(value, list):
        return [hostile(child) for child in value]
    return value + SCRIPT if isinstance(value, str) else value


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of pages: a plan and a comparison, with long names; of a trillion parameters; with hostile names."""
    folder: Path = tmp_path_factory.mktemp("pages")
    whole, apart = (large_plan(folder, expert) for expert in (1, 8))
    plans = {
        "plan": [long_plan()],
        "both": [example_plan(), long_plan()],
        "large": [whole],
        "apart": [whole, apart],
        "hostile": [hostile(long_plan())],
    }
    for name, each in plans.items():
        (folder / f"{name}.html").write_text(render_report(each, PIPELINE.passes, ["before", "after"]), "utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in plans}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # containers have no user namespaces for the sandbox; the pages are our own
        started = playwright.chromium.launch(executable_path=FOUND, args=["--no-sandbox"])
        yield started
        started.close()


def opened(browser: Any, address: str, width: int = 1280, **options: Any) -> tuple[Any, list[str]]:
    """The page, and what goes wrong on it: messages, errors, and requests for anything but the page."""
    page = browser.new_page(viewport={"width": width, "height": 800}, **options)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url not in (address, "data:,") else None)
    page.goto(address)
    return page, wrong


OPEN_ALL = "document.querySelectorAll('details').forEach((details) => (details.open = true))"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["plan", "both", "large", "apart"])
def test_nothing_goes_wrong_and_the_page_does_not_scroll_sideways(
    browser: Any, pages: dict[str, str], name: str, width: int
) -> None:
    page, wrong = opened(browser, pages[name], width)
    assert page.evaluate(OVERFLOW) == 0
    page.evaluate(OPEN_ALL)
    assert page.evaluate(OVERFLOW) == 0
    assert wrong == []
    page.close()


# Contrast of every text with the background it stands on, as WCAG 2.2 defines it.
CONTRAST = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const background = (node) => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const box = node.getBoundingClientRect();
    if (!walker.currentNode.data.trim() || !box.width || node.closest("script, style")) continue;
    const style = getComputedStyle(node);
    const ink = channels(node.closest("svg") ? style.fill : style.color);
    const paper = node.matches("svg text") && node.previousElementSibling?.tagName === "rect"
      ? channels(getComputedStyle(node.previousElementSibling).fill) : background(node);
    const [one, two] = [luminance(ink), luminance(paper)];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${walker.currentNode.data.trim()}`);
  }
  return low;
}"""


@pytest.mark.parametrize("name", ["plan", "large"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_have_contrast(browser: Any, pages: dict[str, str], scheme: str, name: str) -> None:
    page, wrong = opened(browser, pages[name], color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 3 * 64) == (scheme == "dark")
    page.evaluate(OPEN_ALL)
    # every shade of a segment with its label, however small the segments of this plan are
    page.evaluate("""() => { for (const hue of ["weights", "kv", "arena", "scratch", "comm", "context"])
      for (let shade = 0; shade < 6; shade++)
        document.querySelector(".track").insertAdjacentHTML("beforeend",
          `<span class="${hue} shade${shade}" style="width: 60px"><i>${hue}${shade}</i></span>`) }""")
    assert page.evaluate(CONTRAST) == []
    assert wrong == []
    page.close()


def test_print_shows_what_is_closed_on_the_screen(browser: Any, pages: dict[str, str]) -> None:
    page, wrong = opened(browser, pages["plan"], color_scheme="dark")
    recipe = page.locator(".recipe").first
    assert recipe.bounding_box() is None or not recipe.is_visible()
    page.emulate_media(media="print")
    assert recipe.is_visible()
    assert not page.locator("nav").is_visible()
    ink = "getComputedStyle(document.body).color"
    assert page.evaluate(ink) == "rgb(27, 31, 36)"  # dark on paper, whatever the screen's scheme
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="screen")
    assert page.locator("details:not([open])").count() > 0  # printing leaves them as they were
    assert wrong == []
    page.close()


A4 = 718
"""Pixels of CSS between the margins of a sheet."""


@pytest.mark.parametrize("name", ["large", "apart"])
def test_a_sheet_of_paper_is_wide_enough(browser: Any, pages: dict[str, str], name: str) -> None:
    page, wrong = opened(browser, pages[name], A4)
    page.evaluate(OPEN_ALL)
    page.emulate_media(media="print")
    assert page.evaluate(OVERFLOW) == 0
    assert wrong == []
    page.close()


def test_a_plan_of_a_trillion_parameters_opens_at_once(browser: Any, pages: dict[str, str]) -> None:
    for name in ("large", "apart"):
        page, _ = opened(browser, pages[name])
        size = page.evaluate("new Blob([document.documentElement.outerHTML]).size")
        assert size < 500_000
        assert page.evaluate("document.querySelectorAll('*').length") < 20_000
        assert page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < 3000  # 0.2 s when idle
        page.close()


def test_names_are_never_scripts(browser: Any, pages: dict[str, str]) -> None:
    page, wrong = opened(browser, pages["hostile"])
    page.evaluate(OPEN_ALL)
    assert SCRIPT in page.title()
    assert page.title() != "hit"
    assert page.locator("img, script").count() == 1
    assert wrong == []
    page.close()


def test_search_and_sorting(browser: Any, pages: dict[str, str]) -> None:
    page, wrong = opened(browser, pages["plan"])
    section = page.locator("#decisions")
    assert section.locator("[data-item]:visible").count() > 1
    section.get_by_label("Find decisions").fill("SERVING  kv_pool")
    assert section.locator("[data-item]:visible").count() == 1
    assert section.locator(".pass:visible h3").all_inner_texts() == ["plan_memory 1"]
    assert "1 of" in section.locator("output").inner_text()
    section.get_by_label("Find decisions").fill("")
    assert section.locator("[data-item][hidden]").count() == 0
    page.locator("#launches").get_by_label("Find launches").fill("rmsnorm")
    assert page.locator("#launches details.list[open]").count() == 2
    weights = page.locator("#weights")
    weights.get_by_role("button", name="Bytes", exact=True).click()
    values = [int(value) for value in weights.locator("td[data-value]:nth-child(3)").evaluate_all(
        "cells => cells.map((cell) => cell.dataset.value)")]  # fmt: skip
    assert values == sorted(values, reverse=True)
    assert weights.locator("th[aria-sort=descending]").count() == 1
    assert wrong == []
    page.close()


def test_the_page_reads_without_a_script(browser: Any, pages: dict[str, str]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["plan"])
    assert not page.locator(".search").first.is_visible()
    assert page.get_by_text("reads the fewest bytes").is_visible()
    page.locator(".more summary").first.click()
    assert page.locator(".recipe").first.is_visible()
    context.close()
