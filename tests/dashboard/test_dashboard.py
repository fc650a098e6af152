"""The dashboard in a browser, in front of a real stack that trains and samples."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import tinker
from PIL import Image
from playwright.sync_api import Page, Route, expect
from transformers import AutoTokenizer

from gateway.dashboard.thumbnails import thumbnail
from tests.dashboard.conftest import KEY, OTHER_KEY, Visitor
from tests.support.examples import BASE_MODEL, PROMPT, batch, new_model, sample, train
from tests.support.stack import Stack
from tinsmith.v1 import types_pb2

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run of eight steps, with two checkpoints and some samples."""
    trainer = new_model(service, user_metadata={"name": "first run"})
    train(trainer, batch(1), steps=8)
    trainer.save_state("to-go-on").result()
    path = trainer.save_weights_for_sampler("to-sample").result().path
    sample(service.create_sampling_client(model_path=path).result(), PROMPT, num_samples=3)
    return trainer


def run_id_of(trainer: tinker.TrainingClient) -> str:
    return trainer.get_info().model_id


def run_path(trainer: tinker.TrainingClient, part: str = "") -> str:
    return f"run/{quote(run_id_of(trainer), safe='')}/{part}".rstrip("/")


def num_points(page: Page, metric: str) -> int:
    return int(page.get_attribute(f'.chart[data-metric="{metric}"]', "data-points") or 0)


def wait_for_points(page: Page, at_least: int) -> None:
    # Not wait_for_function: the page's policy allows no eval.
    while num_points(page, "loss/token") < at_least:
        page.wait_for_timeout(100)


# Data


def test_runs_are_listed_with_their_newest_numbers(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open()
    row = page.locator(f'tr[data-run="{run_id_of(trainer)}"]')
    expect(row).to_contain_text("first run")
    expect(row.locator(".name small")).not_to_be_empty()
    expect(row).to_contain_text(BASE_MODEL)
    expect(row.locator("td").nth(2)).to_have_text("8")
    assert re.fullmatch(r"[\d.]+", row.locator(".loss .value").inner_text())
    assert row.locator(".spark-line").get_attribute("d")
    row.get_by_role("link").click()
    wait_for_points(page, 8)
    page.keyboard.press("/")  # only the list has a filter
    page.go_back()
    page.wait_for_selector("table.runs")
    page.keyboard.press("/")
    page.keyboard.type("no such run")
    expect(page.get_by_text("No run matches.")).to_be_visible()


def test_charts_show_what_was_trained_and_follow_what_is(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open(run_path(trainer))
    wait_for_points(page, 8)
    for metric in ("grad_norm:mean", "learning_rate:mean"):
        assert num_points(page, metric) == num_points(page, "loss/token")
    expect(page.locator('.chart[data-metric="learning_rate:mean"] output')).to_have_text("0.001")
    colours = page.evaluate(
        """() => {
          const canvas = document.querySelector('.chart canvas');
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )
    assert colours > 20, "the canvas has a curve"
    known = num_points(page, "loss/token")
    train(trainer, batch(2), steps=3)
    wait_for_points(page, known + 3)
    page.get_by_role("button", name="Time", exact=True).click()
    wait_for_points(page, known + 3)
    page.get_by_label("Logarithmic scale of Loss per token").click()
    assert num_points(page, "loss/token") == known + 3


def test_a_cursor_and_a_zoom_are_those_of_all_charts(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open(run_path(trainer))
    wait_for_points(page, 8)
    box = page.locator('.chart[data-metric="loss/token"] .u-over').bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    expect(page.locator('.chart[data-metric="grad_norm:mean"] .chart-at')).to_contain_text("step")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, middle, steps=4)
    page.mouse.up()
    reset = page.get_by_role("button", name="Reset zoom")
    expect(reset).to_be_visible()
    reset.click()
    expect(reset).to_be_hidden()


def test_samples_are_shaded_and_each_token_tells_of_itself(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open(run_path(trainer, "samples"))
    tokens = page.locator(".tokens").first
    expect(tokens.locator(".tok")).to_have_count(12)
    assert page.locator(".sequence").count() == 3
    assert page.locator(".tok.l6").count() > 0, "a model without training is surprised by nearly everything"
    tip = page.locator("#tip")
    tokens.locator(".tok").nth(3).hover()
    expect(tip).to_contain_text("logprob")
    expect(tip).to_contain_text("probability")
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_be_visible()
    expect(tokens.locator(".tok").first).to_have_class(re.compile("current"))
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_new_samples_appear(
    visitor: Visitor, trainer: tinker.TrainingClient, service: tinker.ServiceClient, toy: Path
) -> None:
    page = visitor.open(run_path(trainer, "samples"))
    expect(page.locator(".sample").first).to_be_visible()
    tokenizer = AutoTokenizer.from_pretrained(toy)
    path = f"tinker://{run_id_of(trainer)}/sampler_weights/to-sample"
    sample(service.create_sampling_client(model_path=path).result(), tokenizer.encode(HOSTILE))
    expect(page.locator(".prompt").first).to_have_text(HOSTILE)
    assert page.evaluate("window.hacked") is None


def test_a_models_output_is_shown_as_text_and_nothing_else(
    visitor: Visitor, trainer: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    hostile = new_model(service, user_metadata={"name": HOSTILE, HOSTILE: HOSTILE})
    page = visitor.open()

    def say_hostile_things(route: Route) -> None:
        answer = route.fetch()
        content = answer.json()
        for found in content["samples"]:
            found["texts"] = [HOSTILE] * len(found["tokens"])
        route.fulfill(response=answer, json=content)

    page.route("**/samples*", say_hostile_things)
    expect(page.locator("table.runs")).to_contain_text(HOSTILE)
    for path in (run_path(hostile), run_path(hostile, "details"), run_path(trainer, "samples")):
        page.goto(f"{visitor.base_url}/#/{path}")
        expect(page.locator("main")).to_contain_text(HOSTILE)
    page.locator(".tok").first.hover()
    expect(page.locator("#tip")).to_contain_text("onerror")
    assert page.locator("main img, main script, #tip img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_pictures_of_a_prompt_are_small_and_come_from_this_server_only(
    visitor: Visitor, trainer: tinker.TrainingClient
) -> None:
    file = io.BytesIO()
    Image.effect_noise((300, 200), 150).save(file, "PNG")
    good = thumbnail(types_pb2.Image(data=file.getvalue(), format="png"))
    assert good is not None

    def with_pictures(route: Route) -> None:
        answer = route.fetch()
        content = answer.json()
        for found in content["samples"]:
            found["pictures"] = [
                good,
                None,
                "https://example.invalid/a.png",
                "data:text/html,<script>hacked=1</script>",
            ]
        route.fulfill(response=answer, json=content)

    page = visitor.open()
    page.route("**/samples*", with_pictures)
    page.goto(f"{visitor.base_url}/#/{run_path(trainer, 'samples')}")
    card = page.locator(".sample").first
    picture = card.locator("img")
    expect(picture).to_have_count(1)
    expect(picture).to_have_attribute("alt", "Picture 1 of the prompt")
    assert picture.evaluate("one => one.decode().then(() => [one.naturalWidth, one.naturalHeight])") == [96, 64]
    assert picture.evaluate("one => one.clientWidth / one.clientHeight") == pytest.approx(1.5, rel=0.05), (
        "not stretched"
    )
    expect(card.locator(".no-picture")).to_have_count(3)
    assert page.evaluate("window.hacked") is None


# Actions


def test_a_checkpoint_is_published_kept_downloaded_and_deleted_when_that_is_confirmed(
    visitor: Visitor, service: tinker.ServiceClient
) -> None:
    trainer = new_model(service)
    path = trainer.save_state("victim").result().path
    page = visitor.open(run_path(trainer, "checkpoints"), permissions=["clipboard-read", "clipboard-write"])
    row = page.locator(f'tr[data-path="{path}"]')
    row.get_by_role("button", name="Copy path").click()
    expect(page.locator(".toast")).to_contain_text("Path copied")
    assert page.evaluate("navigator.clipboard.readText()") == path
    row.get_by_role("button", name="Publish").click()
    expect(row.locator(".public")).to_be_visible()
    row.get_by_role("button", name="Unpublish").click()
    expect(row.locator(".public")).to_be_hidden()
    row.get_by_role("combobox").select_option("86400")
    expect(row).to_contain_text("in 24 h")
    with page.expect_download() as download:
        row.get_by_role("button", name="Download").click()
    assert download.value.path().stat().st_size > 1000
    row.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(path)
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    expect(row).to_be_visible()
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    expect(page.get_by_text("No checkpoints.")).to_be_visible()


def test_a_sampler_checkpoint_shows_its_gap(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open(run_path(trainer, "checkpoints"))
    row = page.locator('tr[data-path$="/sampler_weights/to-sample"]')
    expect(row.locator('[data-label="Gap"]')).to_contain_text("nats")
    expect(row.locator('[data-label="On samplers"]')).to_have_text("1 of 1")


# Keys and visitors


def test_the_key_is_asked_for_once_and_stays_in_the_tab(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    visitor.expected = "401"  # Chromium reports every refused request
    page = visitor.open(key=None)
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("API key").fill("tml-wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("does not know this key")
    dialog.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_text("first run")).to_be_visible()
    page.reload()
    expect(page.get_by_text("first run")).to_be_visible()
    assert page.evaluate("Object.values(localStorage).concat(document.cookie).join()").find(KEY) < 0
    page.get_by_role("button", name="Forget key").click()
    expect(page.get_by_role("dialog")).to_be_visible()


def test_a_visitor_without_runs_gets_a_snippet_with_this_servers_address(
    visitor: Visitor, stack: Stack, trainer: tinker.TrainingClient
) -> None:
    page = visitor.open(key=OTHER_KEY)
    expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
    snippet = page.locator("pre").inner_text()
    assert f'base_url="{stack.base_url}"' in snippet
    assert f'base_model="{BASE_MODEL}"' in snippet
    compile(snippet, "snippet", "exec")
    visitor.expected = "404"
    page.goto(f"{visitor.base_url}/#/{run_path(trainer)}")
    expect(page.get_by_role("heading", name="Not here")).to_be_visible()


# The server


def test_services_tell_of_their_memory_and_their_work(visitor: Visitor) -> None:
    page = visitor.open("services")
    expect(page.locator(".card")).to_have_count(3)
    for card in page.locator(".card").all():
        expect(card.locator(".state")).to_have_text("serving")
        assert re.search(r"Memory\s*[\d.]+ [MG]B", card.inner_text())
    expect(page.locator(".rate dd").first).to_have_text(re.compile(r"\d"))  # a rate, from two answers


def test_sessions_are_listed(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open("sessions")
    row = page.locator(f'tr[data-session="{run_id_of(trainer).split(":")[0]}"]')
    expect(row).to_contain_text("active")
    expect(row).to_contain_text(tinker.__version__)


def test_a_run_and_then_its_session_are_ended_when_that_is_confirmed(visitor: Visitor, stack: Stack) -> None:
    service = tinker.ServiceClient(base_url=stack.base_url, api_key=KEY)
    trainer = new_model(service)
    page = visitor.open(run_path(trainer))
    page.get_by_role("button", name="End run").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator(".run-title .state")).not_to_have_text("ended")
    page.get_by_role("button", name="End run").click()
    expect(page.get_by_role("dialog")).to_contain_text(run_id_of(trainer))
    page.get_by_role("dialog").get_by_role("button", name="End run").click()
    expect(page.locator(".run-title .state")).to_have_text("ended")
    expect(page.get_by_role("button", name="End run")).to_be_hidden()
    with pytest.raises(tinker.RequestFailedError, match="the run has ended"):
        trainer.save_state("late").result()

    session_id = run_id_of(trainer).split(":")[0]
    page = visitor.open("sessions")
    row = page.locator(f'tr[data-session="{session_id}"]')
    row.get_by_role("button", name="End session").click()
    expect(page.get_by_role("dialog")).to_contain_text(session_id)
    page.get_by_role("dialog").get_by_role("button", name="End session").click()
    expect(row).to_contain_text("ended on the dashboard")
    expect(row.get_by_role("button", name="End session")).to_be_hidden()


def test_a_run_that_is_ended_with_work_in_it_is_shown_as_ending(
    visitor: Visitor, trainer: tinker.TrainingClient
) -> None:
    # The server's state lasts as long as its work, which no test can hold up. Its answer is changed on the way instead.
    page = visitor.open(run_path(trainer))

    def with_work(route: Route) -> None:
        found = route.fetch().json()
        route.fulfill(json={**found, "num_pending": 2, "ended_at": found["now"], "end_reason": None})

    page.route("**/dashboard/api/runs/*", with_work)
    expect(page.locator(".run-title .state")).to_have_text("ending")
    expect(page.get_by_role("button", name="End run")).to_be_hidden()
    page.unroute_all(behavior="wait")


def test_an_end_that_does_not_reach_the_server_is_told_in_words(
    visitor: Visitor, trainer: tinker.TrainingClient
) -> None:
    page = visitor.open(run_path(trainer))
    visitor.expected = "ERR_FAILED"
    page.route("**/unload_model", lambda route: route.abort())
    page.get_by_role("button", name="End run").click()
    page.get_by_role("dialog").get_by_role("button", name="End run").click()
    expect(page.locator(".toast")).to_have_text("End run: no connection to the server")
    expect(page.get_by_role("button", name="End run")).to_be_visible()


def test_a_question_goes_with_its_page(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open()
    page.locator(f'tr[data-run="{run_id_of(trainer)}"] a').click()
    page.get_by_role("button", name="End run").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page).to_have_title("Tinsmith")


def test_the_end_of_a_run_is_not_for_other_keys(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open(run_path(trainer))
    expect(page.get_by_role("button", name="End run")).to_be_visible()
    page.evaluate(f"sessionStorage.setItem('tinsmith-key', '{OTHER_KEY}')")
    visitor.expected = "404"
    page.get_by_role("button", name="End run").click()
    page.get_by_role("dialog").get_by_role("button", name="End run").click()
    expect(page.locator(".toast.bad")).to_contain_text("there is no run")
    expect(page.locator("main")).to_contain_text("Not here")
    train(trainer, batch(2), steps=1)


def test_a_hidden_tab_asks_nothing_and_a_lost_server_is_told(visitor: Visitor) -> None:
    page = visitor.open()
    text = page.locator("#live-text")
    hide = """(is) => {
      Object.defineProperty(document, 'hidden', { value: is, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(hide, True)
    expect(text).to_have_text("paused")
    page.evaluate(hide, False)
    expect(text).to_have_text("live")
    visitor.expected = "ERR_FAILED"
    page.route("**/dashboard/api/**", lambda route: route.abort())
    expect(text).to_contain_text("no connection")
    page.unroute("**/dashboard/api/**")
    expect(text).to_have_text("live")


class HeldPoints:
    """Requests of a page for new points, which wait from its first one on until they are released."""

    def __init__(self, page: Page) -> None:
        self.asked: list[Route] = []
        self._is_held = True
        page.route("**/history*", lambda route: self.asked.append(route) if self._is_held else route.continue_())
        while not self.asked:
            page.wait_for_timeout(50)

    def release(self) -> None:
        self._is_held = False
        for route in self.asked:
            route.continue_()


def test_a_tab_that_comes_back_while_an_answer_is_on_its_way_does_not_ask_twice_or_draw_points_twice(
    visitor: Visitor, trainer: tinker.TrainingClient
) -> None:
    page = visitor.open(run_path(trainer))
    wait_for_points(page, 8)
    held = HeldPoints(page)
    known = num_points(page, "loss/token")
    train(trainer, batch(3), steps=2)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(3):  # the tab goes and comes back
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(300)
    assert (len(held.asked), asked) == (1, [])
    held.release()
    wait_for_points(page, known + 2)
    page.wait_for_timeout(2500)
    assert num_points(page, "loss/token") == known + 2


def test_a_run_that_is_ended_while_points_are_on_their_way_does_not_draw_them_twice(
    visitor: Visitor, stack: Stack
) -> None:
    trainer = new_model(tinker.ServiceClient(base_url=stack.base_url, api_key=KEY))
    train(trainer, batch(3), steps=8)
    page = visitor.open(run_path(trainer))
    wait_for_points(page, 8)
    held = HeldPoints(page)
    train(trainer, batch(3), steps=2)
    page.get_by_role("button", name="End run").click()
    page.get_by_role("dialog").get_by_role("button", name="End run").click()
    expect(page.locator(".toast")).to_have_text("The run accepts no more work")
    page.wait_for_timeout(300)
    assert len(held.asked) == 1
    held.release()
    expect(page.locator(".run-title .state")).to_have_text("ended")
    wait_for_points(page, 10)
    page.wait_for_timeout(2500)
    assert num_points(page, "loss/token") == 10


# How it looks


def background(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")


def test_the_theme_is_the_systems_until_one_is_chosen(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    light = background(visitor.open(color_scheme="light"))
    page = visitor.open(run_path(trainer), color_scheme="dark")
    dark = background(page)
    assert dark != light
    wait_for_points(page, 8)
    button = page.get_by_role("button", name=re.compile("^Theme"))
    button.click()
    assert background(page) == light
    page.reload()
    assert background(page) == light
    button.click()
    button.click()
    assert background(page) == dark
    page.emulate_media(color_scheme="light")
    assert background(page) == light


@pytest.mark.parametrize(
    "part",
    [
        lambda trainer: "",
        lambda trainer: "services",
        lambda trainer: "sessions",
        *(lambda trainer, part=part: run_path(trainer, part) for part in ("", "samples", "checkpoints", "details")),
    ],
    ids=["runs", "services", "sessions", "metrics", "samples", "checkpoints", "details"],
)
def test_a_phone_needs_no_sideways_scrolling(
    visitor: Visitor, trainer: tinker.TrainingClient, part: Callable[[tinker.TrainingClient], str]
) -> None:
    page = visitor.open(part(trainer), phone=True)
    expect(page.locator("main")).not_to_contain_text("undefined")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_keyboard_alone_leads_to_a_run(visitor: Visitor, trainer: tinker.TrainingClient) -> None:
    page = visitor.open()
    link = page.locator(f'tr[data-run="{run_id_of(trainer)}"] a')
    for _ in range(20):
        page.keyboard.press("Tab")
        if link.evaluate("each => each === document.activeElement"):
            break
    page.keyboard.press("Enter")
    wait_for_points(page, 8)
