"""The console of a real gateway: what each caller may read, and the page in headless Chromium."""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from quire_cli.commands.setup import digest_line
from quire_client import Client
from quire_client.demo import demo_model_dir
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from tests.http_thread import HttpThread
from tests.processes.browser import needs_browser, open_browser, wait_for
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

USER, OPERATOR = "key-of-a-user-0123", "key-of-an-operator-0123"
NO_SCHEDULER = Service("none", [], "127.0.0.1:1", Path("none"))  # no scheduler listens here
PROMPT = "words-that-only-the-client-knows"
# A tenth of a second per step: slow enough to be seen.
SLOW = ("--executor", "sim", "--sim-step-ms", "100", "--sim-eos-probability", "0", "--num-blocks", "200")
BODY = {"messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True}


def get(url: str, key: str = "", body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any, str]:
    """Status, headers and text of an answer."""
    if key:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


class Console:
    """Addresses of a stack with a console."""

    def __init__(self, stack: Stack, folder: Path, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        scheduler = stack.start_scheduler()
        self.worker = stack.start_worker(scheduler, demo_model_dir(), *SLOW, "--model-name", "demo")
        flags = (f"--console-listen={self.url.removeprefix('http://')}", *flags)
        self.gateway = stack.start_gateway(scheduler, flags=flags)
        self.worker.wait_ready()
        self.gateway.wait_ready()

    def get(self, path: str, key: str = "", body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any, str]:
        """Status, headers and text of an answer."""
        return get(f"{self.url}{path}", key, body, **headers)

    @contextmanager
    def running(self, request_id: str, key: str | None, num_tokens: int = 300) -> Iterator[None]:
        """A request that decodes meanwhile."""
        ended = threading.Event()

        def read() -> None:
            with Client.connect(self.gateway.address, api_key=key) as client:
                options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "request_id": request_id}
                with client.stream(token_ids=range(5, 69), **options) as stream:
                    for _ in stream:
                        if ended.is_set():
                            return

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(20)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """With keys for users and operators."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("users", "operators")}
    (folders["users"] / "team").write_text(USER)
    (folders["operators"] / "ops").write_text(digest_line(OPERATOR))
    keys = (f"--api-keys={folders['users']}", f"--admin-keys={folders['operators']}")
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        yield Console(stack, tmp_path_factory.mktemp("console"), *keys)


@pytest.fixture(scope="module")
def open_console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """Without keys."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        yield Console(stack, tmp_path_factory.mktemp("console"))


def test_the_state_is_for_operators_and_the_api_for_users(console: Console) -> None:
    assert console.get("/console/api/state")[0] == 401
    assert console.get("/console/api/state", USER)[0] == 401
    status, headers, text = console.get("/console/api/state", OPERATOR)
    assert (status, headers["cache-control"]) == (200, "no-store")
    assert json.loads(text)["schedulers"][0]["model"] == "demo"
    assert console.get("/v1/models", OPERATOR)[0] == 401, "a key of an operator does not permit inference"
    assert console.get("/v1/models", USER)[0] == 200
    for path in ("/console/api/none", "/console/none.js", "/console/../server.py"):
        assert console.get(path, OPERATOR)[0] == 404
    assert console.get("/console/api/state", OPERATOR, body={})[0] == 405, "read-only"


def test_the_page_needs_no_key_and_allows_no_foreign_code(console: Console) -> None:
    status, headers, text = console.get("/")
    assert (status, "<title>Quire console</title>" in text) == (200, True)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    status, headers, _ = console.get("/console/app.js")
    assert (status, headers.get_content_type()) == (200, "text/javascript")


def test_the_state_shows_a_running_request_and_no_text(console: Console) -> None:
    def row() -> dict[str, Any] | None:
        pools = json.loads(console.get("/console/api/state", OPERATOR)[2])["schedulers"][0]["pools"]
        rows = [row for pool in pools for row in pool["rows"] if row["request_id"].endswith("seen")]
        return {**rows[0], "states": base64.b64decode(pools[0]["states"])} if rows else None

    with console.running("seen", USER):
        found = wait_for("a row", row)
        grown = wait_for("more tokens", lambda: (new := row()) and new["num_tokens"] > found["num_tokens"] + 2 and new)
    assert (found["prompt_tokens"], found["is_prefill"]) == (64, False)
    assert sum(state >= 2 for state in grown["states"]) == grown["num_blocks"]
    wait_for("its end", lambda: row() is None)
    console.get("/v1/chat/completions", USER, {**BODY, "max_tokens": 2})
    assert PROMPT not in console.get("/console/api/state", OPERATOR)[2]


def test_where_clients_need_no_keys_the_playground_needs_one_of_operators(tmp_path: Path) -> None:
    (tmp_path / "ops").write_text(digest_line(OPERATOR))
    http, listen = (f"127.0.0.1:{free_port()}" for _ in range(2))
    flags = (f"--console-listen={listen}", f"--http-listen={http}", f"--admin-keys={tmp_path}")
    with Stack(tmp_path) as stack:
        gateway = stack.start_gateway(NO_SCHEDULER, flags=flags)
        wait_for("the console", lambda: "console at" in gateway.log())
        assert get(f"http://{http}/v1/models")[0] == 200
        assert get(f"http://{listen}/v1/models")[0] == 401
        assert get(f"http://{listen}/v1/models", OPERATOR)[0] == 200


def test_without_keys_other_host_names_are_refused(open_console: Console) -> None:
    for path in ("/console/", "/console/api/state", "/v1/models"):
        assert open_console.get(path)[0] == 200
        status, _, text = open_console.get(path, host="evil.example:80")
        assert (status, "not at 'evil.example:80'" in text) == (403, True)


class _Page(BaseHTTPRequestHandler):
    """A page of another site, which sends to the URLs of its query what needs no preflight."""

    def do_GET(self) -> None:
        script = """
            const urls = JSON.parse(decodeURIComponent(location.search.slice(1)));
            const post = {method: "POST", mode: "no-cors", headers: {"content-type": "text/plain"}, body: "{}"};
            const sent = urls.flatMap((url) => [fetch(url, post), fetch(url, {mode: "no-cors"})]);
            Promise.allSettled(sent).then((done) => { document.title = done.map((one) => one.status).join(); });
        """
        page = f"<title>sending</title><script>{script}</script>".encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""


@needs_browser()
def test_a_page_of_another_site_neither_controls_nor_reads_a_gateway_without_keys(tmp_path: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    with Stack(tmp_path) as stack, HttpThread(_Page) as site, open_browser(rules) as browser:
        Console(stack, tmp_path, f"--http-listen={http}", "--keyless-operators")
        url = f"http://{http}"
        controls = ("/pause", "/sleep", "/start_weight_update", "/reset_prefix_cache", "/v1/completions")
        targets = urllib.parse.quote(json.dumps([url + path for path in controls]))
        for page in (site.url, f"http://evil.example:{site.server_port}"):
            browser.get(f"{page}/?{targets}")
            wait_for("answers", lambda: browser.title not in ("", "sending"))
            assert "fulfilled" in browser.title, "the requests were sent"
        assert json.loads(get(f"{url}/is_paused")[2])["is_paused"] is False
        assert json.loads(get(f"{url}/is_sleeping")[2])["is_sleeping"] is False
        refused = [line for line in get(f"{url}/metrics")[2].splitlines() if "PERMISSION_DENIED" in line]
        assert [line.rpartition(" ")[2] for line in refused] == ["20.0"], "the gateway got them all"
        for path in ("/v1/models", "/metrics", "/health"):  # a name of another site that now means this address
            browser.get(f"http://evil.example:{http.rpartition(':')[2]}{path}")
            assert "not at &#x27;evil.example" in browser.page_source or "not at 'evil.example" in browser.page_source
        browser.get(f"{url}/v1/models")
        assert "demo" in browser.page_source
        assert get(f"{url}/pause", body={})[0] == 200, "what the page sent was a pause"


def lane(browser: WebDriver, name: str) -> list[str]:
    return [item.get_attribute("title") or "" for item in browser.find_elements(By.CSS_SELECTOR, f"#lane-{name} li")]


def picture(browser: WebDriver, selector: str) -> str:
    """The pixels of a canvas."""
    return str(browser.execute_script("return document.querySelector(arguments[0]).toDataURL()", selector))


def text_of(browser: WebDriver, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def problems(browser: WebDriver) -> list[Any]:
    """Errors and warnings in the log, such as blocked code or a failed request."""
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@needs_browser()
def test_the_page_shows_a_request_its_blocks_and_a_chat(open_console: Console) -> None:
    with open_browser() as browser:
        browser.get(f"{open_console.url}/console/")
        wait_for("the state", lambda: text_of(browser, "#connection") == "live")
        assert text_of(browser, "#models") == "demo 1 worker"
        with open_console.running("shown", None):
            wait_for("the request runs", lambda: "shown" in lane(browser, "running"))
            wait_for("its row", lambda: "decode" in text_of(browser, ".pool .rows"))
            before = picture(browser, ".pool > canvas")
            wait_for("changed blocks", lambda: picture(browser, ".pool > canvas") != before)
            wait_for("a rate", lambda: text_of(browser, "#rate") not in ("–", "0"))
        wait_for("the request has finished", lambda: "shown" in lane(browser, "finished"))
        stream_a_chat(browser)
        open_console.get("/v1/models/none")
        browser.find_element(By.LINK_TEXT, "Usage").click()
        wait_for("the error", lambda: "NOT_FOUND" in text_of(browser, "#errors"))
        wait_for("the use", lambda: "without a tenant" in text_of(browser, "#tenants"))
        assert problems(browser) == []


HOUR = """
const done = arguments[0];
import("/console/charts.js").then(({ readHour }) => {
  const bytes = (rows) => new Uint8Array(new Float32Array(rows.flat()).buffer);
  const samples = (...rows) => ({ samples: btoa(String.fromCharCode(...bytes(rows))) });
  const one = samples([13, 1, 0, 100, 0, 0, 0], [3, 2, 5, 200, 0, 4, 0]);
  const hour = readHour([one, samples([7, 1, 0, 300, 0, 0, 0])], [0.1, 0.2], 1000);
  done(Object.entries(hour).map(([name, { points }]) => [name, points.map(({ time, value }) => [time, value])]));
});
"""


@needs_browser()
def test_the_charts_show_the_last_hour(open_console: Console) -> None:
    with open_browser() as browser, open_console.running("sampled", None):
        browser.get(f"{open_console.url}/console/")
        hour = dict(browser.execute_async_script(HOUR))
        assert hour["rate"] == [[990, 10], [1000, 50]], "the samples of both schedulers together"
        assert (hour["running"], hour["waiting"]) == ([[990, 1], [1000, 3]], [[990, 0], [1000, 5]])
        assert [value for _, value in hour["ttft"]] == [None, pytest.approx(0.15)]
        browser.find_element(By.ID, "hour").click()
        state = lambda: json.loads(open_console.get("/console/api/history")[2])[0]["samples"]  # noqa: E731
        before = len(wait_for("a sample", state, 30.0))
        wait_for("the next one", lambda: len(state()) > before, 30.0)
        assert problems(browser) == []


def stream_a_chat(browser: WebDriver) -> None:
    browser.find_element(By.LINK_TEXT, "Playground").click()
    assert not browser.find_element(By.ID, "pools").is_displayed(), "the playground is a view of its own"
    browser.find_element(By.ID, "max-tokens").clear()
    browser.find_element(By.ID, "max-tokens").send_keys("12")
    browser.find_element(By.ID, "message").send_keys("What does os.path.join do?")
    browser.find_element(By.ID, "send").click()

    def num_tokens() -> int:
        return len(browser.find_elements(By.CSS_SELECTOR, "#chat .assistant .token"))

    early = wait_for("the first tokens", num_tokens)
    assert early < 12, "tokens appear while the others are computed"
    assert wait_for("the answer", lambda: "12 tokens (length)" in text_of(browser, "#answer-note"))
    assert num_tokens() == 12
    token = browser.find_element(By.CSS_SELECTOR, "#chat .assistant .token")
    browser.execute_script("arguments[0].focus()", token)
    assert "%" in text_of(browser, "#tip"), "the token's probability"
    wait_for("the prompt", lambda: "from the prefix cache" in text_of(browser, "#prompt-note"))
    assert "What does os.path.join do?" in text_of(browser, "#prompt-text")


@needs_browser()
def test_the_page_asks_for_keys_and_uses_them(console: Console) -> None:
    with open_browser(is_dark=True, width=500) as browser:
        browser.get(f"{console.url}/console/")
        wait_for("the dialog", lambda: browser.find_element(By.ID, "keys").is_displayed())
        assert "an API key is required" in text_of(browser, "#keys-note")
        browser.find_element(By.ID, "operator-key").send_keys(OPERATOR)
        browser.find_element(By.ID, "inference-key").send_keys(USER)
        browser.find_element(By.CSS_SELECTOR, "#keys button").click()
        wait_for("the state", lambda: text_of(browser, "#connection") == "live")
        browser.find_element(By.LINK_TEXT, "Playground").click()
        wait_for("the models", lambda: text_of(browser, "#model") == "demo")
        unexpected = [entry for entry in problems(browser) if "401" not in entry["message"]]
        assert unexpected == []


CLIPPED = """
const box = document.querySelector(".scroll").getBoundingClientRect();
return [...document.querySelectorAll("#workers td:nth-child(4)")].filter((cell) => {
  const state = cell.getBoundingClientRect();
  return !state.width || state.right > box.right + 1 || cell.scrollWidth > cell.clientWidth + 1;
}).map((cell) => cell.textContent);
"""


@needs_browser()
def test_all_views_fit_on_a_phone(open_console: Console) -> None:
    with (
        open_browser(width=390, height=844) as browser,
        open_console.running("a-request-with-a-rather-long-name", None),
    ):
        browser.get(f"{open_console.url}/console/")
        wait_for("its row", lambda: "decode" in text_of(browser, "#pools"))
        state = "document.querySelector('#workers td:nth-child(4)').textContent = 'lost 123 s ago, 17 sequences moved';"
        assert browser.execute_script(state + CLIPPED) == [], "the state of a worker can be read without scrolling"
        for link in browser.find_elements(By.CSS_SELECTOR, "nav a"):
            link.click()
            wide = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1], (link.text, wide)
            assert browser.execute_script(OVERLAPS) == []


OVERLAPS = """
const leaves = [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility()
  && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
  && !element.closest("dialog, #tip, option, ol, .scroll, #chat"));
const boxes = leaves.map((element) => {
  const range = document.createRange();
  range.selectNodeContents(element);
  const [text, box] = [range.getBoundingClientRect(), element.getBoundingClientRect()]; // the box clips its text
  return [element, { left: Math.max(text.left, box.left), right: Math.min(text.right, box.right),
    top: Math.max(text.top, box.top), bottom: Math.min(text.bottom, box.bottom) }];
});
const found = [];
boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
  if (one.contains(other) || other.contains(one)) return;
  const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  if (width > 2 && height > 4) found.push(`${one.textContent} | ${other.textContent}`);
}));
return found;
"""
LARGE_FLEET = """
const done = arguments[0];
import("/console/fleet.js").then(({ Fleet }) => {
  const fleet = new Fleet(() => {});
  const worker = (i, state) => ({ worker_id: `pool-a-${String(i).padStart(3, "0")}`, state: `WORKER_STATE_${state}`,
    rows_used: i % 50, rows_total: 256, steps: String(i),
    blocks_used: 900 * i, blocks_cached: 1000, blocks_free: 99000 - 900 * i });
  const state = (number) => [{ address: "10.0.0.1:50051", model: "qwen", revision: "0123456789abcdef", connected: true,
    prefix_index: "redis", num_gateways: 3, preemptions: String(2 * number), refused_deadline: "0",
    workers: [...Array(100).keys()].map((i) => worker(i, i === 7 && number ? "LOST" : "READY")) }];
  fleet.addEvents("10.0.0.1:50051", [{ at: 990, text: "worker pool-a-007 is lost", is_bad: true, count: 0 }]);
  fleet.addEvents("10.0.0.1:50051", [{ at: 990, text: "worker pool-a-007 is lost", is_bad: true, count: 0 },
    { at: 991, text: "sequences queued again: lost", is_bad: false, count: 7 }]);
  const began = performance.now();
  for (let number = 0; number < 10; number++) fleet.update(1000 + number, state(Math.min(number, 1)));
  window.fleet = fleet;
  done([fleet.wanted(), performance.now() - began]);
});
"""


def workers_in(browser: WebDriver) -> list[str]:
    return [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#workers tbody tr")]


@needs_browser()
def test_a_fleet_of_a_hundred_workers_can_be_sorted_and_filtered(open_console: Console) -> None:
    with open_browser() as browser:
        browser.get(f"{open_console.url}/console/style.css")  # without the page's own fleet
        page = open_console.get("/console/")[2].replace('<script type="module" src="app.js"></script>', "")
        browser.execute_script("document.open(); document.write(arguments[0]); document.close()", page)
        wanted, spent_ms = browser.execute_async_script(LARGE_FLEET)
        assert wanted == ["pool-a-049", "pool-a-099", "pool-a-048", "pool-a-098"], "the busiest, not the blocks of all"
        assert spent_ms < 5000
        assert len(workers_in(browser)) == 100
        assert "lost 8 s ago, 7 sequences moved" in workers_in(browser)[7]
        assert not any("undefined" in row for row in workers_in(browser))
        events = [item.text for item in browser.find_elements(By.CSS_SELECTOR, "#events li span")]
        assert events == ["7 sequences queued again: lost", "worker pool-a-007 is lost"], "the newest first, each once"
        blocks = browser.find_elements(By.CSS_SELECTOR, "#workers th button")[5]
        blocks.click()
        blocks.click()
        assert workers_in(browser)[0].startswith("pool-a-099"), "the fullest first"
        browser.find_element(By.ID, "filter").send_keys("lost")
        assert len(workers_in(browser)) == 1
        assert text_of(browser, "#count-workers") == "1 of 100"
        browser.find_element(By.CSS_SELECTOR, "#workers tbody button").click()
        assert browser.execute_script("return window.fleet.wanted()") == ["pool-a-007"]


@needs_browser()
def test_a_lost_worker_stays_with_what_happened(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack, open_browser() as browser:
        console = Console(stack, tmp_path)
        browser.get(f"{console.url}/console/")
        wait_for("the worker", lambda: any("ready" in row for row in workers_in(browser)))
        assert "prefix index in memory" in text_of(browser, "#schedulers")
        assert "1 gateway" in text_of(browser, "#schedulers")
        with console.running("moved", None, 20):
            wait_for("the request runs", lambda: "moved" in lane(browser, "running"))
            console.worker.kill()
            wait_for(
                "the loss", lambda: any("lost" in row and "1 sequence moved" in row for row in workers_in(browser))
            )
            wait_for("the event", lambda: f"worker {console.worker.name} is lost" in text_of(browser, "#events"))
            console.worker.start()
            wait_for("its return", lambda: any("ready" in row for row in workers_in(browser)))
        browser.find_element(By.LINK_TEXT, "Requests").click()
        ends = ("length", "aborted")  # the client leaves it, if it still runs
        wait_for("its end", lambda: any(f"moved {end}" in text_of(browser, "#requests") for end in ends))
        browser.find_element(By.LINK_TEXT, "moved").click()
        wait_for("its stages", lambda: "moved: lost" in text_of(browser, "#timeline"))
        stages = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#timeline tr")]
        assert [stage.split()[1] for stage in stages] == ["queue", "prefill", "decode", "move"]
        assert f"resumed on {console.worker.name}" in stages[-1]
        assert "ended: " in text_of(browser, "#timeline")
        browser.find_element(By.LINK_TEXT, "Overview").click()
        browser.refresh()
        wait_for("the events of before", lambda: "is lost" in text_of(browser, "#events"))
        assert text_of(browser, "#events").count(f"worker {console.worker.name} joined") == 2


@needs_browser()
@pytest.mark.parametrize("width", [500, 1010, 1300, 1700])
def test_texts_do_not_overlap(open_console: Console, width: int) -> None:
    with open_browser(width=width) as browser, open_console.running("a-request-with-a-rather-long-name", None):
        browser.get(f"{open_console.url}/console/")
        wait_for("its row", lambda: "decode" in text_of(browser, "#pools"))
        assert browser.execute_script(OVERLAPS) == []
