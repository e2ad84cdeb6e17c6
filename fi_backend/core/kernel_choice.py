# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies the tiles of a layer: candidates, what rules them out, and their rank.

Tile and chunk of each work item follow per step from the plan's rules (csrc/core/plan_rules.h), which hosts
and devices share; `CostModel` overrides their figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant

CPU = "cpu"
SM90A = "sm_90a"


@dataclass(frozen=True)
class Kernel:
    """One way to multiply the tiles of a layer on a target.

    name: "cpu", "mma" (warps, csrc/sm80) or "wgmma" (tiles of 128 rows by warpgroups, csrc/sm90; the others
    as "mma"). tiles: the least and the greatest query tile it has, in packed rows. cost: microseconds of 128
    query rows times 64 keys of 128 elements on one multiprocessor of an H200, which ranks candidates.
    """

    name: str
    tiles: tuple[int, int]
    cost: float

    @property
    def wgmma(self) -> bool:
        """Whether the module is compiled with warpgroups."""
        return self.name == "wgmma"


@dataclass(frozen=True)
class Candidate:
    """A kernel, and why it cannot run the layer; None where it can."""

    kernel: Kernel
    reason: str | None


def candidates(
    spec: AttentionSpec, arch: str, variant: AttentionVariant | None = None
) -> tuple[Candidate, ...]:
    """Return all kernels for a target, best first, each with the reason that rules it out.

    arch: "cpu", or a CUDA target such as "sm_90a".
    """
    if arch == CPU:
        return (Candidate(Kernel(CPU, (1, 128), 0.0), None),)
    # 1 x 8k tokens of prefill, 16 bits: 1158 and 1734 us for 993 such tiles a multiprocessor (hopper.md).
    # Wider heads and fp8 caches are ranked alike, by count of their products: they are yet to be measured.
    wgmma = Kernel("wgmma", (16, 128), 1.17)
    mma = Kernel("mma", (16, 128 if _warp_columns(spec, arch) <= 128 else 64), 1.75)
    found = (Candidate(wgmma, _no_wgmma(spec, arch, variant)), Candidate(mma, None))
    return tuple(sorted(found, key=lambda each: each.kernel.cost))


def choose(
    spec: AttentionSpec, arch: str, variant: AttentionVariant | None = None, *, name: str | None = None
) -> Kernel:
    """Return the best kernel that can run a layer, or the one that is named.

    Raises ValueError where there is none of that name, or it cannot run the layer.
    """
    found = candidates(spec, arch, variant)
    if name is None:
        return next(each.kernel for each in found if each.reason is None)
    for each in found:
        if each.kernel.name == name:
            if each.reason is not None:
                raise ValueError(f"kernel: {name!r} {each.reason}")
            return each.kernel
    names = ", ".join(each.kernel.name for each in found)
    raise ValueError(f"kernel: expected one of {names} on {arch}; got {name!r}.")


def _warp_columns(spec: AttentionSpec, arch: str) -> int:
    """Columns by which `mma` decides whether two warps share a row: 128 are the most that one holds.

    Where registers can be moved between warps, wider keys take none of them.
    """
    return spec.head_dim_v if arch == SM90A else max(spec.head_dim, spec.head_dim_v)


def _no_wgmma(spec: AttentionSpec, arch: str, variant: AttentionVariant | None) -> str | None:
    if arch != SM90A:
        return f"needs the target {SM90A}; got {arch}."
    if spec.batch_invariant and spec.kv_dtype != spec.dtype:
        return (
            "adds the products of fp8 keys in another order than the warps that multiply smaller tiles; "
            "batch_invariant=True needs 'mma'."
        )
    if spec.batch_invariant and max(spec.head_dim, spec.head_dim_v) > 128:
        return (
            "has no shared memory for states at fixed key positions beside queries of heads wider than 128; "
            f"batch_invariant=True needs 'mma'; got {spec.head_dim}, {spec.head_dim_v}."
        )
    if variant is not None and (variant.key_transform, variant.value_transform) != (None, None):
        return f"reads keys and values as they lie in shared memory; variant {variant.name} transforms them."
    if spec.kv_dtype != spec.dtype and max(spec.head_dim, spec.head_dim_v) > 128:
        return (
            "has no shared memory to widen fp8 caches of heads wider than 128; got "
            f"{spec.head_dim}, {spec.head_dim_v}."
        )
    return None
