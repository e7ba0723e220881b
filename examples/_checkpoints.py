"""Checkpoints of a training run: where they lie, and how a run goes on from one."""

import operator
import shlex
import sys
from pathlib import Path
from typing import TypeVar, cast

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

T = TypeVar("T")


def open_checkpoints(
    folder: Path | None, *, resume: bool
) -> ocp.CheckpointManager | None:
    """Opens a folder of checkpoints, and refuses one that is not to be gone on from."""
    if folder is None:
        return None
    accuracy = operator.itemgetter("accuracy")  # saved at the end of each epoch
    best = managers.BestN(
        get_metric_fn=accuracy, n=1, keep_checkpoints_without_metrics=False
    )
    keep = managers.AnyPreservationPolicy([managers.LatestN(2), best])
    # Written before `save` returns, because the next step donates the arrays.
    options = ocp.CheckpointManagerOptions(
        preservation_policy=keep, best_fn=accuracy, enable_async_checkpointing=False
    )
    checkpoints = ocp.CheckpointManager(folder.absolute(), options=options)
    newest = checkpoints.latest_step()
    if newest is not None and not resume:
        sys.exit(
            f"`{folder}` holds a checkpoint of step {newest} already. "
            "Go on from it with `--resume`, or name another folder."
        )
    return checkpoints


def restore(checkpoints: ocp.CheckpointManager, state: T) -> tuple[T, str]:
    """Restores the newest checkpoint, or says how to go on without it.

    Returns:
        The state, which is the given one where there is no checkpoint, and where the
        run goes on from.
    """
    if checkpoints.latest_step() is None:
        return state, "the start"
    *before, newest = sorted(checkpoints.all_steps())
    # One structure under every policy, so that any run can go on as any.
    target = ocp.args.StandardRestore(state)
    try:
        return cast(T, checkpoints.restore(newest, args=target)), f"step {newest}"
    except Exception as error:  # of what kind, depends on which file is damaged
        path = Path(str(checkpoints.directory), str(newest))
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        on = f"go on from step {before[-1]}" if before else "begin again"
        # By the user's hand, for it may be worth mending.
        sys.exit(
            f"The checkpoint of step {newest}, `{path}`, cannot be restored: it is "
            f"damaged, or of another model ({reason}). To {on}, delete it and run the "
            f"same command once more:\n    rm -r {shlex.quote(str(path))}"
        )
