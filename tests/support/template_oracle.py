"""Decide which characters of a rendered chat are supervised, from its markers and the marks of known templates.

This shares no code with gearbox.data.loss_mask. HEADS and ENDS list the marks by which a person sees where an answer
begins and ends.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from support.template_chats import TOOLS, MarkedChat, Part

# The end of the head of an answer, without the spaces after it. Some models go on right after a tool's result.
HEADS = re.compile(
    r"""
    <\|im_start\|>(?:assistant|text)(?:<\|im_sep\|>)? | <\|im_assistant\|>assistant<\|im_middle\|>
    | <\|start_header_id\|>(?:GPT4\ Correct\ )?[Aa]ssistant<\|end_header_id\|>
    | <\|header_start\|>assistant<\|header_end\|> | <start_of_turn>model | <\|turn>model | <tool_response\|>
    | \[/INST\] | \[/TOOL_RESULTS\] | <\|start\|>assistant | <\|begin\|>assistant
    | <\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|> | <\uff5cAssistant\uff5c> | <\uff5ctool▁outputs?▁end\uff5c>
    | </function_results>
    | <\uff5chy_Assistant[^\uff5c]*\uff5c> | <\|assistant\|>:? | \]~b\]ai | <seed:bos>assistant | <SPECIAL_11>Assistant
    | <\|assistant_start\|> | <\|begin_assistant\|> | <\|start_of_role\|>assistant[^<]*<\|end_of_role\|>
    | \[\|assistant\|\] | <\|extra_0\|> | assistant<\|role_sep\|> | <role>ASSISTANT</role> | <assistant>
    | <beginning_of_sentence>ai\ name=assistant | <\|role\|>assistant<\|says\|> | <reserved_107> | <_bot> | <AI>
    | <\#bot\#> | <\|answer\|> | <\|model\|> | <start_assistant> | <\|[AB](?:ssistan|o)t\|>:? | \[RESP\]
    | <step>\ Source:\ assistant(?:\nDestination:\ user)?
    | <s>(?:assistant|bot)(?=\n) | <BOS>bot(?=\n) | Assistant:\ </s>
    | (?:ASSISTANT|[Aa]ssistant|Response|RESPONSE|Bot|Falcon|Answer|Agent|Trả\ lời)\s*: | 答\uff1a
    | \#\#\#\ Response(?=\n) | @@\ Response(?=\n)
    """,
    re.X,
)
# The marks at which generation stops.
ENDS = re.compile(
    r"""
    <\|(?:im_end|eot_id|eom_id|eot|eom|end|call|return|calls|END_OF_TURN_TOKEN|endoftext|end_of_text|assistant_end
    |tools_suffix|message_sep|role_end|end_of_sentence|eos|EOT|end_of_turn|user|observation|tool_response)\|?>
    | </s> | <end_of_turn> | <turn\|> | <\uff5cend▁of▁sentence\uff5c>
    | <\uff5chy_eos[^\uff5c]*\uff5c> | <\uff5chy_place▁holder▁no▁2\uff5c> | \[e~\[
    | <seed:eos> | <SPECIAL_12> | <end_of_sentence> | \[\|endofturn\|\] | <_end> | <end_message> | <sep>
    | </assistant> | <end_of_utterance> | <eos> | <EOS> | <eoa> | <_user> | <reserved_106> | <s>(?=User:|Bot:)
    """,
    re.X,
)

# What templates write between the head and an answer without reasoning.
SUPPLIED = re.compile(
    r"(?P<space>\s*)(?P<open>(?:<(?:mm:)?think(?::\w+)?>)?)\s*(?P<close>(?:</(?:mm:)?think(?::\w+)?>)?)\s*"
)
THINK = "<think>"  # answers may begin with it themselves


class Place(NamedTuple):
    """A part of a chat at characters [first, end) of a rendering."""

    first: int
    end: int
    part: Part


@dataclass
class Span:
    """The characters of an answer that are supervised."""

    owner: int
    firsts: set[int]
    """Each place where the span may begin: after the head, or after what the template adds on request."""
    least: int
    """The end of the answer's last part."""
    end: int | None
    """The end of the mark that ends the turn, or None if the text has none."""


def places(text: str, marked: MarkedChat) -> list[Place]:
    """Return the place of each part that the text shows, in order of the text."""
    found, names = [], []
    for part in marked.parts:
        if part.what == "name":
            continue
        first = text.find(part.first)
        end = text.find(part.last, first) if first >= 0 else -1
        if end >= 0:
            found.append(Place(first, end + len(part.last), part))
    for part in marked.parts:
        if part.what == "name":
            low = max((place.end for place in found if -1 < place.part.owner < part.owner), default=0)
            high = min((place.first for place in found if place.part.owner > part.owner), default=len(text))
            own = max((place.end for place in found if place.part.owner == part.owner), default=0)
            if own and (end := ENDS.search(text, own, high)):
                high = end.start()
            first = text.find(part.first, low, high)
            if first >= 0:
                names.append(Place(first, first + len(part.first), part))
    return sorted(found + names)


def missing(text: str, marked: MarkedChat) -> list[str]:
    """Return what the text lacks. Templates may leave out the reasoning of all answers but the last.

    Some templates write the id of a call and not its name. That matters where the call is trained.
    """
    shown = [place.part for place in places(text, marked)]
    answers = [i for i, turn in enumerate(marked.chat.turns) if turn["role"] == "assistant"]
    return [
        "the tools" if part.owner == TOOLS else f"{part.what} of turn {part.owner + 1}"
        for part in marked.parts
        if part not in shown and not (part.what == "reasoning" and part.owner != answers[-1])
    ]


def unknowable(text: str, marked: MarkedChat, trained: set[int]) -> str:
    """Return why the trained characters of a text cannot be right, or an empty string.

    The text goes on after its last answer with a turn of the user, if the template allows it.
    """
    found = places(text, marked)
    for owner in sorted(trained):
        own = [place for place in found if place.part.owner == owner]
        others = [place for place in found if place.part.owner != owner]
        if any(own[0].end <= place.first < own[-1].first for place in others):
            return f"the template puts other turns inside turn {owner + 1}"
        least = max(place.end for place in own)
        before = min((place.first for place in others if place.first >= least), default=len(text))
        if not ENDS.search(text, least, before):
            return "the template writes no mark at which generation stops"
    return ""


def spans(text: str, marked: MarkedChat, prompts: dict[int, str | None], marks_answers: bool = False) -> list[Span]:
    """Return the span of each answer of the text. `prompts` are the renderings that ask for each answer.

    A template that marks its answers itself decides about the spaces after a head.
    """
    found, result = places(text, marked), []
    for owner, turn in enumerate(marked.chat.turns):
        own = [place for place in found if place.part.owner == owner]
        if turn["role"] != "assistant" or not own:
            continue
        first, least = own[0].first, max(place.end for place in own)
        others = [place for place in found if place.part.owner != owner]
        after = max((place.end for place in others if place.end <= first), default=0)
        before = min((place.first for place in others if place.first >= least), default=len(text))
        firsts = _firsts(text, after, first, prompts.get(owner))
        heads = [head.end() for head in HEADS.finditer(text, after, first)]
        thinks = turn["content"].startswith(THINK) and any(text[at : max(firsts)].strip() == THINK for at in heads)
        if thinks or marks_answers:
            firsts |= _firsts(text, after, first, None)
        end = ENDS.search(text, least, before)
        result.append(Span(owner, firsts, least, end.end() if end else None))
    return result


def _firsts(text: str, after: int, first: int, prompt: str | None) -> set[int]:
    """Return the places between the part before an answer and its own first part where the span may begin."""
    heads = [head.end() for head in HEADS.finditer(text, after, first)]
    asked = len(prompt) if prompt and text.startswith(prompt) and after <= len(prompt) <= first else None
    if not heads:
        return {asked} if asked is not None else {*range(after, first + 1)}
    if asked is not None and asked >= heads[-1]:
        return {asked}
    is_after_a_head = asked is not None and any(not text[head:asked].strip() for head in heads if head <= asked)
    supplied = SUPPLIED.match(text, heads[-1], first)
    assert supplied is not None
    before, opened, closed = supplied.span("space"), supplied.span("open"), supplied.span("close")
    near = {*range(before[0], before[1] + 1), *range(opened[1], closed[0] + 1), *range(closed[1], supplied.end() + 1)}
    return near | {asked} if asked is not None and is_after_a_head else near
