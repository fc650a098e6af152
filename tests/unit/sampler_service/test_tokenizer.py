"""Text and chats become the tokens that transformers itself would make, or are refused by name."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sampler_service import tokenizer as module
from sampler_service.tokenizer import BrokenTokenizer, Chat, ChatTokenizer, load_tokenizer
from tests.unit.sampler_service.conftest import CHAT_TEMPLATE
from tinsmith.errors import FailedPrecondition, InvalidRequest, Unsupported

MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
TOOLS = [{"type": "function", "function": {"name": "log", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizer(text_model_folder: Path) -> ChatTokenizer:
    return ChatTokenizer(str(text_model_folder))


@pytest.fixture(scope="module")
def stock(text_model_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(text_model_folder)


def chat(messages: Any = MESSAGES, **fields: Any) -> Chat:
    made = {name: value if isinstance(value, bool | str) else json.dumps(value) for name, value in fields.items()}
    return Chat(messages if isinstance(messages, str) else json.dumps(messages), **made)


def test_other_threads_go_on_while_a_long_text_is_converted(
    tokenizer: ChatTokenizer, stock: PreTrainedTokenizerBase
) -> None:
    """The interpreter's lock was kept until the end: a chat of 2.6 MB stopped its sampler for 18 s."""
    text = "1, the \U0001f600 " * 100_000
    ticks, ended = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    tokens = tokenizer.tokens(text, add_special_tokens=False)
    num_meanwhile = ticks - before
    ended.set()
    thread.join()
    assert num_meanwhile > 20
    assert tokens[:1000].tolist() == stock.encode(text[:10_000], add_special_tokens=False)[:1000]


def test_text_is_encoded_with_its_special_tokens(tokenizer: ChatTokenizer, stock: PreTrainedTokenizerBase) -> None:
    text = "the dog<|end|> sat \U0001f600"
    tokens = tokenizer.tokens(text, add_special_tokens=True)
    assert tokens.tolist() == stock.encode(text)
    assert stock.eos_token_id in tokens
    assert tokenizer.tokens("", add_special_tokens=False).tolist() == []


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"tools": TOOLS},
        {"add_generation_prompt": True, "template_kwargs": {"thinking": False}},
    ],
    ids=str,
)
def test_a_chat_is_what_transformers_makes_of_it(
    tokenizer: ChatTokenizer, stock: PreTrainedTokenizerBase, how: dict[str, Any]
) -> None:
    theirs = {**how, **how.get("template_kwargs", {})}
    theirs.pop("template_kwargs", None)
    expected = stock.apply_chat_template(MESSAGES, return_dict=False, **theirs)
    assert tokenizer.chat_tokens(chat(**how)).tolist() == expected


@pytest.mark.parametrize(
    ("asked", "field", "message"),
    [
        (chat("["), "messages", "is not JSON"),
        (chat("[" * 100_000), "messages", "is not JSON"),
        (chat("{}"), "messages", "is not a JSON list of objects"),
        (chat([[{"role": "user", "content": "a"}]]), "messages", "is not a JSON list of objects"),
        (chat([]), "messages", "is empty"),
        (chat([{"role": "martian", "content": ""}]), "messages", "does not render them: no martians"),
        (chat([{"role": "user", "content": None}]), "messages", "does not render them: "),
        (chat([{"role": "user"}]), "messages", "does not render them: "),
        (chat([{"role": "user", "content": "\ud800"}]), "messages", "is no text"),
        (chat(add_generation_prompt=True, continue_final_message=True), "messages", "not compatible"),
        (chat(tools="nothing"), "tools", "is not JSON"),
        (chat(tools={}), "tools", "is not a JSON list of objects"),
        (chat(template_kwargs=[1]), "template_kwargs", "is not a JSON object"),
        (chat(template_kwargs={"mood": 1}), "template_kwargs", r"'mood' is not a variable .* it has \['thinking'\]"),
        (chat(template_kwargs={"chat_template": "x"}), "template_kwargs", "'chat_template' is not a variable"),
        (chat(template_kwargs={"messages": []}), "template_kwargs", "'messages' is not a variable"),
    ],
    ids=lambda value: None if isinstance(value, Chat) else value[:30],
)
def test_messages_that_cannot_be_rendered_are_refused_by_name(
    tokenizer: ChatTokenizer, asked: Chat, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: .*{message}") as raised:
        tokenizer.chat_tokens(asked)
    assert raised.value.metadata == {"field": field}


def test_text_is_bounded_as_it_comes_and_as_it_is_rendered(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 100)
    with pytest.raises(InvalidRequest, match="text: 101 bytes of text are above the limit of 100"):
        tokenizer.tokens("a" * 99 + "é", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match=r"messages: .* characters of JSON are above"):
        tokenizer.chat_tokens(chat(MESSAGES * 3))
    with pytest.raises(InvalidRequest, match=r"messages: .* bytes of text are above"):
        tokenizer.chat_tokens(chat(MESSAGES[:1], tools=[{"a": "b" * 85}]))


def test_tools_that_the_template_would_drop_are_refused(
    text_model_folder: Path, tmp_path: Path, stock: PreTrainedTokenizerBase
) -> None:
    stock.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("tools", "no_tools"))
    with pytest.raises(InvalidRequest, match="tools: the model's chat template has no place for them"):
        ChatTokenizer(str(tmp_path)).chat_tokens(chat(tools=TOOLS))


def test_no_template_and_no_tokenizer_are_said(
    tmp_path: Path, stock: PreTrainedTokenizerBase, model_folder: Path
) -> None:
    stock.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    plain = ChatTokenizer(str(tmp_path))
    assert not plain.has_chat_template
    with pytest.raises(FailedPrecondition, match="has no chat template; send text or tokens"):
        plain.chat_tokens(chat())
    with pytest.raises(Unsupported, match="has no tokenizer"):
        ChatTokenizer(str(model_folder))


@pytest.mark.parametrize(
    ("content", "said"), [("nonsense", "broken: expected ident at line 1"), ("{}", "broken: Model missing")]
)
def test_a_damaged_tokenizer_is_said_to_be_there_and_broken(
    tmp_path: Path, model_folder: Path, content: str, said: str
) -> None:
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BrokenTokenizer, match=f"tokenizer.json is there, but it is {said}"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(Unsupported, match=r"needs Python code of its own, which is not run here$"):
        load_tokenizer(str(tmp_path))
    assert "[y/N]" not in capfd.readouterr().out


def test_settings_that_cut_or_fill_up_are_left_out(tmp_path: Path, stock: PreTrainedTokenizerBase) -> None:
    stock.save_pretrained(tmp_path)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    file.enable_truncation(3)
    file.enable_padding(length=8)
    file.save(str(tmp_path / "tokenizer.json"))
    whole = ChatTokenizer(str(tmp_path))
    assert whole.tokens("the cat sat", add_special_tokens=False).tolist() == stock.encode("the cat sat")
    assert Tokenizer.from_str(whole.json).encode("the cat sat").ids == stock.encode("the cat sat")


HERMES_TEMPLATE = "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}{{ messages[0].content }}"
LLAMA3_TEMPLATE = '{% if tools %}Environment: ipython {"name": x, "parameters": y}{% endif %}{{ messages[0].content }}'
CODER_TEMPLATE = (
    "{% if tools %}<tool_call><function={{ tools }}><parameter=a></tool_call>{% endif %}{{ messages[0].content }}"
)
GLM_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools }}<arg_key><arg_value></tool_call>{% endif %}{{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (HERMES_TEMPLATE, "hermes"),
        (LLAMA3_TEMPLATE, "llama3"),
        (CODER_TEMPLATE, "qwen_xml"),
        (GLM_TEMPLATE, "glm"),
        ("{% if tools %}<tool_call><function={{ tools }}></tool_call>{% endif %}", None),
        ("{{ tools }}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}", "mistral"),
        ("{{ tools }}[TOOL_CALLS] [{{ call | tojson }}]", "mistral_array"),
        ("{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n{{ arguments }}", "deepseek_v3"),
        ("{{ tools }}<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ arguments }}", "deepseek_v31"),
        ("{{ tools }}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi"),
        ("{{ tools }} to=functions.{{ name }}<|channel|>commentary json<|message|>{{ arguments }}<|call|>", "harmony"),
        ("{{ tools }}", None),
        (None, None),
    ],
)
def test_the_form_of_tool_calls_is_known_by_the_chat_template(
    text_model_folder: Path, template: str | None, known: str | None
) -> None:
    tokenizer = ChatTokenizer(str(text_model_folder))
    tokenizer._tokenizer.chat_template = template
    assert tokenizer.tool_call_format == known


CALLS = (
    "{% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
)


def test_messages_that_the_template_would_drop_are_refused(tmp_path: Path, stock: PreTrainedTokenizerBase) -> None:
    """As Qwen's templates do with a developer's message, and gpt-oss's with a second system message."""
    stock.save_pretrained(tmp_path)
    known = "{% if message.role in ('user', 'assistant') or (message.role == 'system' and loop.first) %}"
    template = CHAT_TEMPLATE.replace("{{ '<|end|>'", known + "{{ '<|end|>'").replace(
        "'\\n' }}", "'\\n' }}{% endif %}", 1
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ChatTokenizer(str(tmp_path))
    # A text that another message has, too, shows nothing.
    user, system = {"role": "user", "content": "be brief"}, {"role": "system", "content": "be brief"}
    assert "system: be brief" in stock.decode(tokenizer.chat_tokens(chat([system, user])).tolist())
    for role, messages in (
        ("developer", [{"role": "developer", "content": "be brief"}, user]),
        ("tool", [user, {"role": "tool", "content": "be brief", "tool_call_id": "a"}]),
        ("system", [user, system]),
    ):
        index = next(n for n, message in enumerate(messages) if message["role"] == role)
        with pytest.raises(
            InvalidRequest, match=rf"^messages\[{index}\]: .* does not show a message of the role"
        ) as raised:
            tokenizer.chat_tokens(chat(messages))
        assert raised.value.metadata == {"field": f"messages[{index}]"}
        assert repr(role) in raised.value.message


def test_calls_of_tools_that_the_template_would_drop_are_refused(
    tokenizer: ChatTokenizer, tmp_path: Path, stock: PreTrainedTokenizerBase
) -> None:
    call = {"type": "function", "function": {"name": "log", "arguments": {"a": 1}}}
    # A name that is in the text anyway shows nothing.
    messages = [{"role": "user", "content": "the log"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(
        InvalidRequest, match=r"messages\[1\].tool_calls: the model's chat template does not show calls of tools"
    ) as caught:
        tokenizer.chat_tokens(chat(messages))
    assert caught.value.metadata["field"] == "messages[1].tool_calls"
    stock.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("{% endfor %}", CALLS + "{% endfor %}", 1))
    shown = ChatTokenizer(str(tmp_path))
    assert 'log({"a": 1})' in stock.decode(shown.chat_tokens(chat(messages)).tolist())
    plain = CALLS.replace(" | tojson", "").replace(
        "{{ call.function.arguments }}", '{{ "" + call.function.arguments }}'
    )
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("{% endfor %}", plain + "{% endfor %}", 1))
    as_text = ChatTokenizer(str(tmp_path))  # DeepSeek's templates take the arguments as JSON
    assert 'log({"a": 1})' in stock.decode(as_text.chat_tokens(chat(messages)).tolist())
    with pytest.raises(InvalidRequest, match=r"messages\[0\].tool_calls: is not a list of objects"):
        tokenizer.chat_tokens(chat([{"role": "assistant", "content": "", "tool_calls": ["log"]}]))


def test_calls_that_the_template_shows_by_their_id_are_shown(tmp_path: Path, stock: PreTrainedTokenizerBase) -> None:
    """Kimi K2's template shows the id of a call, functions.NAME:NUMBER, and not its name."""
    by_id = CALLS.replace("call.function.name", "call.id")
    stock.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("{% endfor %}", by_id + "{% endfor %}", 1))
    kimi = ChatTokenizer(str(tmp_path))

    def calling(call_id: str) -> Chat:
        call = {"id": call_id, "type": "function", "function": {"name": "log", "arguments": {"a": 1}}}
        return chat(
            [{"role": "user", "content": "the log"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )

    assert 'functions.log:0({"a": 1})' in stock.decode(kimi.chat_tokens(calling("functions.log:0")).tolist())
    with pytest.raises(InvalidRequest, match=r"messages\[1\].tool_calls: the model's chat template does not show"):
        kimi.chat_tokens(calling("call_7"))  # so the model would not know which tool it called


@pytest.mark.parametrize("arguments", [{"a": 1}, ["a", 1], 7131, '["a"]', "not JSON"])
def test_arguments_of_another_shape_than_the_template_shows_are_refused(
    tmp_path: Path, stock: PreTrainedTokenizerBase, arguments: Any
) -> None:
    """GLM-4.6's template takes what is not an object for an empty one."""
    shown = CALLS.replace(
        "call.function.arguments", "(call.function.arguments if call.function.arguments is mapping else {})"
    )
    assert shown != CALLS
    stock.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("{% endfor %}", shown + "{% endfor %}", 1))
    call = {"id": "c", "type": "function", "function": {"name": "log", "arguments": arguments}}
    messages = [{"role": "user", "content": "the log"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = ChatTokenizer(str(tmp_path))
    if isinstance(arguments, dict):
        assert '"a": 1' in stock.decode(tokenizer.chat_tokens(chat(messages)).tolist())
    else:
        with pytest.raises(InvalidRequest, match="does not show arguments of calls"):
            tokenizer.chat_tokens(chat(messages))


def test_a_template_that_looks_for_the_call_of_an_answer_finds_it(
    tmp_path: Path, stock: PreTrainedTokenizerBase
) -> None:
    """Gemma 4's template takes the name of an answer from the call with its id."""
    answers = (
        "{% for call in messages[1].tool_calls %}{% if call.id == message.tool_call_id %}"
        "{{ 'answer of ' + call.function.name }}{% set ns.found = true %}{% endif %}{% endfor %}"
        "{% if message.role == 'tool' and not ns.found %}{{ raise_exception('whose answer?') }}{% endif %}"
    )
    template = "{% set ns = namespace(found=false) %}" + CHAT_TEMPLATE.replace(
        "{% endfor %}", CALLS + answers + "{% endfor %}", 1
    )
    stock.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    call = {"id": "functions.log:0", "type": "function", "function": {"name": "log", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "the log"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "it is 3", "tool_call_id": "functions.log:0"},
    ]
    assert "answer of log" in stock.decode(ChatTokenizer(str(tmp_path)).chat_tokens(chat(messages)).tolist())


def test_arguments_of_calls_that_the_template_would_drop_are_refused(
    tmp_path: Path, stock: PreTrainedTokenizerBase
) -> None:
    only_names = CALLS.replace("({{ call.function.arguments | tojson }})", "()")
    stock.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("{% endfor %}", only_names + "{% endfor %}", 1))
    shown = ChatTokenizer(str(tmp_path))

    def calling(arguments: dict[str, int]) -> Chat:
        call = {"type": "function", "function": {"name": "log", "arguments": arguments}}
        return chat([{"role": "assistant", "content": "", "tool_calls": [call]}])

    assert "log()" in stock.decode(shown.chat_tokens(calling({})).tolist())
    with pytest.raises(InvalidRequest, match=r"messages\[0\].tool_calls: .* does not show arguments of calls of tools"):
        shown.chat_tokens(calling({"a": 1}))
