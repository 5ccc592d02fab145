"""A tree search over forks of a chat: expand the best open branch, evaluate its children, come back to older ones.

    best continuation of length D = argmax over paths of sum_i log p(token_i | prefix, token_<i)

Best first: the open node of the largest sum is taken, its `width` likeliest tokens become children, each a fork of
the node's session that has read one token more. Sums only fall, so the first node of depth D that is taken is the
best of all; with every branch in memory the search is exact. A branch that memory did not keep is lost to the search,
which goes on with the others. A tidy search deletes sessions that it is done with. An untidy one leaves them open,
as agents do that never say when a branch is finished; then nothing but a mark tells them from those that it comes
back to. Knows runtimes, no policies and no budgets.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch

from statebridge.errors import BudgetError, StoreError
from statebridge.sessions import SessionRuntime


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes
    ----------
    path, score
        The continuation and its log-likelihood; () when there was none.
    continued
        Branches that the search went on with from their sessions.
    lost
        Branches that it wanted to go on with, and that were not there any more.
    refused
        Branches that could not begin.
    """

    path: tuple[int, ...]
    score: float
    continued: tuple[tuple[int, ...], ...]
    lost: int
    refused: int

    @property
    def completed(self) -> bool:
        """Whether the search came to its end."""
        return bool(self.path)


@dataclass(order=True)
class _Node:
    cost: float  # minus the log-likelihood
    path: tuple[int, ...]
    ahead: torch.Tensor | None = field(compare=False)  # log-probabilities of the next token [vocab]

    @property
    def name(self) -> str:
        return "-".join(map(str, ("root", *self.path)))


def search(run: SessionRuntime, prefix: torch.Tensor, *, depth: int, width: int, tidy: bool = True) -> Found:
    """Look for the likeliest continuation of `prefix` [1, T] of `depth` tokens.

    Parameters
    ----------
    run
        A runtime without sessions.
    prefix
        Token ids, at least one.
    depth, width
        Length of the continuation, and children of a node.
    tidy
        Delete sessions that the search is done with; else mark them as worth nothing.
    """
    run.new("root")
    run.mark("root", 0.0)
    frontier = [_Node(0.0, (), _ahead(run.step(prefix)))]
    continued: list[tuple[int, ...]] = []
    lost = refused = 0
    while frontier:
        node = heapq.heappop(frontier)
        if len(node.path) == depth:
            return Found(node.path, -node.cost, tuple(continued), lost, refused)
        reads = len(node.path) + 1 < depth  # nothing is read after the last token
        if node.ahead is None or (reads and node.name in run.usage().lost):
            lost += 1
            continue
        children = [
            _Node(node.cost - float(gain), (*node.path, int(token)), None)
            for gain, token in zip(*node.ahead.topk(width), strict=True)
        ]
        if reads:
            continued.append(node.path)
            for child in children:
                refused += not _begin(run, node, child)
                if child.ahead is not None and len(child.path) + 1 == depth:
                    _done(run, child.name, tidy)
            _done(run, node.name, tidy)
        for child in children:
            heapq.heappush(frontier, child)
    return Found((), float("nan"), tuple(continued), lost, refused)


def _begin(run: SessionRuntime, parent: _Node, child: _Node) -> bool:
    """Fork the parent, let the child read its token, and say whether it could begin; else it has no `ahead`."""
    try:
        run.fork(parent.name, child.name, relevance=-child.cost, switch=True)
    except BudgetError:
        return False
    except StoreError:  # the parent was lost on the way
        return True
    child.ahead = _ahead(run.step(torch.tensor([[child.path[-1]]])))
    return True


def _done(run: SessionRuntime, name: str, tidy: bool) -> None:
    if tidy:
        run.delete(name)
    elif name not in run.usage().lost:
        run.mark(name, float("-inf"))


def _ahead(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the next token, float32 [vocab]."""
    return logits[0, -1].float().log_softmax(-1).cpu()
