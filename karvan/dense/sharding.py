"""Divides dense parameters over servers, and their state over any other number of servers.

States can be merged if they were taken between the same pushes, which the caller must ensure; so merge them
when they are saved, not when they are needed. Versions may differ, because servers may receive pushes in
different orders: all continue from the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan.native import _native


def owner_of_parameter(name: str, servers: int) -> int:
    """The server whose range of hashes contains the name's: FarmHash64 of its UTF-8; must not change."""
    if servers < 1:
        raise ValueError(f"servers must be at least 1, got {servers}.")
    upper = (_native.farm64(name.encode()) & 0xFFFF_FFFF_FFFF_FFFF) >> 32
    return upper * servers >> 32


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a single server that holds what all of these hold."""
    if not states:
        raise ValueError("Expected the states of at least one server, got none.")
    for state in states[1:]:
        if state["optimizer"] != states[0]["optimizer"]:
            raise ValueError(
                f"Servers of one model have the same optimizer, got {states[0]['optimizer']} and "
                f"{state['optimizer']}."
            )
    return {
        "version": max(state["version"] for state in states),
        "optimizer": states[0]["optimizer"],
        "parameters": _joined([state["parameters"] for state in states]),
        "slots": _joined([state["slots"] for state in states]),
        "waiting": _merged_waiting([state["waiting"] for state in states]),
        "answers": _merged_answers([state["answers"] for state in states]),
    }


def split_state(state: Mapping[str, Any], servers: int) -> list[dict[str, Any]]:
    """The states of so many servers, each with the parameters it owns; tensors are shared, not copied."""
    return [
        {
            **state,
            "parameters": _owned(state["parameters"], server, servers),
            "slots": _owned(state["slots"], server, servers),
            "waiting": [
                {**push, "gradients": _owned(push["gradients"], server, servers)} for push in state["waiting"]
            ],
        }
        for server in range(servers)
    ]


def _owned(values: Mapping[str, Any], server: int, servers: int) -> dict[str, Any]:
    return {name: value for name, value in values.items() if owner_of_parameter(name, servers) == server}


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined = {name: value for part in parts for name, value in part.items()}
    if len(joined) != sum(map(len, parts)):
        twice = sorted(name for name in joined if sum(name in part for part in parts) > 1)
        raise ValueError(f"Each parameter is on one server, but these are on several: {', '.join(twice)}.")
    return dict(sorted(joined.items()))


def _merged_waiting(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    pushes = [[(push["trainer"], push["sequence"]) for push in part] for part in parts]
    if any(each != pushes[0] for each in pushes):
        raise ValueError(
            "The states are not of one moment: on different servers different pushes wait for a step, "
            + " and ".join(str(each) for each in pushes)
            + ". Expected states that were taken while no push is in flight, or after a flush."
        )
    return [
        {
            **same[0],
            "staleness": max(push["staleness"] for push in same),
            "gradients": _joined([push["gradients"] for push in same]),
        }
        for same in zip(*parts, strict=True)
    ]


def _merged_answers(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """All answers that servers remember; of different answers to a push the smallest: a refusal, if any."""
    merged: dict[str, dict[int, list[Any]]] = {}
    for part in parts:
        for trainer, answers in part.items():
            its = merged.setdefault(trainer, {})
            for answer in answers:
                its[answer[0]] = min(its.get(answer[0], answer), answer)
    return {trainer: [its[number] for number in sorted(its)] for trainer, its in sorted(merged.items())}
