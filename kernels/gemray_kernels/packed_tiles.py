"""How packed weights lie in memory for kernels that stream them: units of inputs, one after the other.

A unit is so many inputs of every output. Its codes are 16-bit words, each with one code of every plane: word c holds
the codes of the inputs c, c + C, c + 2 C and so on of its unit. So one mask of a register of words gives two
neighbouring inputs, and each plane is a tile of neighbouring inputs. Within a plane an output has one scale, or one for
each run of words.

A code that is masked out of its word is a bfloat16 number as it stands, of a size that is made up for: integers are
``code · 2^-133`` (or 2^-129), as subnormal numbers and those of the first binade are evenly spaced, e2m1 is
``value · 2^-126``, e4m3 ``value · 2^-120``. How the bits of floats lie is `gemray_kernels.packed_words`'.

Shape legend: O outputs, B units, C words of a unit, P planes, R runs of words, G groups of inputs that share a scale,
X scales of a unit as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gemray_kernels.packed_weight import Code, CodeName, PackedWeight, Scaling, Tiling, groups_of
from gemray_kernels.packed_words import MASKED, joined

E2M1_SCALE = 2.0**118
"""Size of a kernel's scale of e2m1: all of e4m3's are in the highest eighth of bfloat16's binades then, whose exponents
begin with three ones."""
LARGE_WORDS = 32
"""Words of NVFP4's larger units: as many as int4's have, in two runs."""
_CHUNK = 1 << 23
"""Codes that are laid out at one time."""
_MOST_TAKEN = 9 / 8
"""Room of larger units, for that of the ones that take least: larger ones are read in fewer steps."""


@dataclass(frozen=True)
class Unit:
    """How the codes of one kind make words."""

    planes: int
    words: int
    empty: int
    """The code of nothing."""
    factor: float
    """What a sum of products with the kernel's numbers is multiplied with, beside scales."""

    @property
    def inputs(self) -> int:
        """Inputs of a unit."""
        return self.planes * self.words


UNITS: Mapping[CodeName, Unit] = {
    "int4": Unit(4, 32, 8, 2.0**21),
    "int8": Unit(2, 64, 128, 2.0**21),
    "fp8": Unit(2, 64, 0, 1.0),
    "nvfp4": Unit(4, 16, 0, 2.0**8),
}


@dataclass(frozen=True, kw_only=True)
class TiledWeight:
    """A weight that is laid out in units."""

    code: CodeName
    scaling: Scaling
    words_BOC: Tensor
    """int16."""
    scale_BO: Tensor
    """Scales of a unit: four bfloat16 in an int64 (int4), eight bits for each of four planes in an int32 (nvfp4; two of
    them in an int64 where a unit has two runs of words), or a float32. Of numbers that find theirs by their place:
    float32 [G, O]."""
    factor_O: Tensor
    """float32, of the sum of products."""
    num_in: int
    leaves: int = 1
    """Equal parts of the inputs, each of which begins with a unit of its own."""
    group: int = 1
    """Inputs that share a scale."""
    place: int = 0
    """How many inputs of its group lie before the first one."""
    parts: int = 0
    """Numbers in bfloat16 that stand for each factor in exact numerics (`gemray_kernels.triton.factor_parts`); 0 where
    there are none, 1 for scales of units, which are such numbers themselves, 3 for two of which the first is short."""
    parts_O: Tensor | None = None
    """int32: the first part in the lower half, the second one above it. None where scales of units are the parts."""

    @property
    def parts_or_factors(self) -> Tensor:
        """What a launch is given for the parts, which reads nothing of it where there are none."""
        return self.factor_O if self.parts_O is None else self.parts_O

    @property
    def unit(self) -> Unit:
        """How its codes make words."""
        return replace(UNITS[self.code], words=self.words_BOC.shape[-1])

    @property
    def runs(self) -> int:
        """Runs of words of a unit that have scales of their own."""
        return max(1, self.unit.words // UNITS[self.code].words)

    def scales_from(self, first: int) -> Tensor:
        """Scales of the outputs from `first` on, those of each run beside each other."""
        if self.runs == 1:
            return self.scale_BO[..., first:]
        return self.scale_BO.view(torch.int32)[..., self.runs * first :]

    @property
    def num_out(self) -> int:
        """Outputs."""
        return self.factor_O.shape[-1]

    @property
    def leaf(self) -> int:
        """Inputs of a leaf."""
        return self.num_in // self.leaves

    @property
    def units_of_leaf(self) -> int:
        """Units of a leaf, the last of which may be a part of one."""
        return self.words_BOC.shape[-3] // self.leaves


def tiling_of(code: Code, group: int, scale_dtype: torch.dtype, first: int, num_in: int) -> Tiling | None:
    """How a weight is laid out; None for one whose groups do not fit units.

    Args:
        code: of its numbers.
        group: inputs that share a scale.
        scale_dtype: as it is stored.
        first: place of the first of its inputs among the whole weight's.
        num_in: its inputs.
    """
    unit = UNITS[code.name]
    units = -(-num_in // unit.inputs)
    code_bytes = 2 * unit.words * units
    if code.name != "nvfp4" and (first + num_in - 1) // group == first // group:
        return Tiling(Scaling.ROW, code_bytes, 0)
    if group % unit.inputs == 0 and first % unit.inputs == 0:
        return Tiling(Scaling.SUMS, code_bytes, 4 * units)
    if first % unit.words or group % unit.words:
        return None
    if (code.name, scale_dtype) == ("int4", torch.bfloat16):
        return Tiling(Scaling.CODES, code_bytes, 8 * units)
    if (code.name, scale_dtype) == ("nvfp4", torch.float8_e4m3fn):
        words = _words_within(num_in, unit.planes, (LARGE_WORDS, unit.words))
        units = -(-num_in // (unit.planes * words))
        return Tiling(Scaling.CODES, 2 * words * units, 4 * units * words // unit.words, words=words)
    return None


def exact_tiling_of(code: Code, group: int, scale_dtype: torch.dtype, first: int, num_in: int, leaves: int) -> Tiling:
    """How a weight is laid out for exact numerics: with a scale a plane where that fits, else with one a number.

    Every scaling has the same numbers, so that ranks may choose differently.

    Args:
        code: of its numbers.
        group: inputs that share a scale.
        scale_dtype: as it is stored.
        first: place of the first of its inputs among the whole weight's.
        num_in: its inputs.
        leaves: into which they are cut.
    """
    unit = UNITS[code.name]
    leaf = num_in // leaves
    if code.name != "nvfp4" and (first + num_in - 1) // group == first // group:
        words = unit_words(code, leaf)
        return Tiling(Scaling.ROW, 2 * words * leaves * -(-leaf // (unit.planes * words)), 0, leaves, words)
    units = leaves * -(-leaf // unit.inputs)
    code_bytes = 2 * unit.words * units
    if leaf % unit.words == 0 and group % unit.words == 0:
        if (code.name, scale_dtype) == ("int4", torch.bfloat16):
            return Tiling(Scaling.CODES, code_bytes, 8 * units, leaves)
        if (code.name, scale_dtype) == ("nvfp4", torch.float8_e4m3fn):
            words = _words_within(leaf, unit.planes, (LARGE_WORDS, unit.words))
            units = leaves * -(-leaf // (unit.planes * words))
            return Tiling(Scaling.CODES, 2 * words * units, 4 * units * words // unit.words, leaves, words)
    if leaf % unit.inputs == 0 and group % unit.inputs == 0 and first % unit.inputs == 0:
        return Tiling(Scaling.SUMS, code_bytes, 4 * units, leaves)
    groups = groups_of(group, first, num_in)
    return Tiling(Scaling.EACH, code_bytes, 4 * (groups.stop - groups.start), leaves)


def unit_words(code: Code, leaf: int) -> int:
    """Choose how many words a unit has where scales leave that open: many, but few behind the end of a leaf.

    A tile product takes sixteen inputs at a time, so that a plane has no less.
    """
    unit = UNITS[code.name]
    return _words_within(leaf, unit.planes, [unit.words >> n for n in range(3) if unit.words >> n >= 16])


def _words_within(leaf: int, planes: int, sizes: Sequence[int]) -> int:
    taken = [-(-leaf // (planes * words)) * words for words in sizes]
    return next(words for words, size in zip(sizes, taken, strict=True) if size <= _MOST_TAKEN * min(taken))


@torch.no_grad()
def laid_out(weight: PackedWeight, tiling: Tiling) -> TiledWeight:
    """Lay a weight out in the memory that it has; the weight itself is no more to be used.

    Args:
        weight: with or without a leading dimension of experts; its tensors begin their memory.
        tiling: of this weight, for which the memory has room.
    """
    unit = UNITS[weight.code.name]
    if tiling.words:
        unit = replace(unit, words=tiling.words)
    leaf = weight.num_in // tiling.leaves
    units_of_leaf = -(-leaf // unit.inputs)
    lead, num_out, units = weight.codes_OW.shape[:-2], weight.num_out, tiling.leaves * units_of_leaf
    rows = _one_below_the_other(weight)
    factors = _factor(rows, tiling, unit).view(*lead, num_out)

    def of_leaves(content: Callable[[PackedWeight, Tiling, Unit, int], Tensor]) -> Tensor:
        firsts = range(0, weight.num_in, leaf)
        return torch.cat([content(rows.inputs(first, leaf), tiling, unit, units_of_leaf) for first in firsts])

    def by_expert(content: Tensor) -> Tensor:
        apart = content.view(len(content), *lead, num_out, *content.shape[2:])
        return apart.movedim(1, 0) if lead else apart

    words = by_expert(of_leaves(_words))
    scales = None
    if tiling.scaling is Scaling.EACH:
        scales = by_expert(rows.scale_OG.float().T)
    elif tiling.scaling is not Scaling.ROW:
        scales = by_expert(of_leaves(_scales))
    return TiledWeight(
        code=weight.code.name,
        scaling=tiling.scaling,
        words_BOC=_into(weight.codes_OW, words).view(*lead, units, num_out, unit.words),
        scale_BO=factors if scales is None else _into(weight.scale_OG, scales).view(scales.shape),
        factor_O=factors,
        num_in=weight.num_in,
        leaves=tiling.leaves,
        group=weight.group,
        place=weight.first % weight.group,
    )


def _one_below_the_other(weight: PackedWeight) -> PackedWeight:
    """The experts' weights as the rows of one: each has hundreds of small ones, and a start would be all launches."""
    if weight.codes_OW.dim() == 2:
        return weight
    row_scale = weight.row_scale_O
    return replace(
        weight,
        codes_OW=weight.codes_OW.flatten(0, 1),
        scale_OG=weight.scale_OG.flatten(0, 1),
        row_scale_O=None if row_scale is None else row_scale.flatten(),
    )


def _into(memory: Tensor, content: Tensor) -> Tensor:
    """`content` in the storage of `memory`, from its beginning."""
    storage = memory.untyped_storage()
    if memory.storage_offset() or storage.nbytes() < content.nbytes:
        raise ValueError(f"{storage.nbytes()} bytes from place {memory.storage_offset()} for {content.nbytes}")
    room = torch.empty(0, dtype=torch.uint8, device=content.device).set_(storage)
    return room[: content.nbytes].view(content.dtype).copy_(content.flatten())


def _words(weight: PackedWeight, tiling: Tiling, unit: Unit, units: int) -> Tensor:
    words = torch.empty(units, weight.num_out, unit.words, dtype=torch.int16, device=weight.codes_OW.device)
    step = max(1, _CHUNK // weight.num_in)
    for first in range(0, weight.num_out, step):
        part = weight.rows(first, min(step, weight.num_out - first))
        codes_OI = _codes(part)
        if weight.code.name == "nvfp4" and tiling.scaling is Scaling.CODES:  # which know no scale of zero
            run = UNITS["nvfp4"].words
            groups = _group_of_places(part, run, -(-weight.num_in // run))
            is_zero = (part.scale_OG.float() == 0)[:, groups].repeat_interleave(run, dim=1)
            codes_OI = codes_OI.masked_fill(is_zero[:, : weight.num_in], 0)
        codes_OI = torch.nn.functional.pad(codes_OI, (0, units * unit.inputs - weight.num_in), value=unit.empty)
        codes_OBPC = codes_OI.view(-1, units, unit.planes, unit.words).to(torch.int32)
        words[:, first : first + step] = _joined(weight.code.name, codes_OBPC).to(torch.int16).transpose(0, 1)
    return words


def _joined(name: CodeName, codes_OBPC: Tensor) -> Tensor:
    """Words [O, B, C] of the codes of all planes."""
    if name in MASKED:
        return joined(name, codes_OBPC)
    planes = codes_OBPC.unbind(2)
    width = 16 // len(planes)
    return torch.stack([code << width * place for place, code in enumerate(planes)]).sum(0, dtype=torch.int32)


def _codes(weight: PackedWeight) -> Tensor:
    """Codes of the weight's inputs, unsigned, uint8 [O, I]."""
    bits = 8 // weight.code.per_word if weight.code.word.itemsize == 1 else 32 // weight.code.per_word
    codes = weight.codes_OW.contiguous().view(torch.uint8)
    if weight.code.word == torch.int8:
        codes = codes ^ 128
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    skipped = weight.first % weight.code.per_word
    return codes[:, skipped : skipped + weight.num_in]


def _scales(weight: PackedWeight, tiling: Tiling, unit: Unit, units: int) -> Tensor:
    if tiling.scaling is Scaling.SUMS:
        groups = _group_of_places(weight, unit.inputs, units)
        return weight.scale_OG.float()[:, groups].T.contiguous()
    run = UNITS[weight.code.name].words
    count, runs = -(-weight.num_in // run), unit.words // run
    scale_OS = weight.scale_OG[:, _group_of_places(weight, run, count)].float()
    scale_OS = torch.nn.functional.pad(scale_OS, (0, units * unit.planes * runs - count))
    scale_OBRP = _SCALES[weight.code.name](scale_OS.view(-1, units, unit.planes, runs).transpose(2, 3))
    scale_OBX = scale_OBRP.contiguous().flatten(2)
    whole = {4: torch.int32, 8: torch.int64}[scale_OBX.shape[2] * scale_OBX.itemsize]
    return scale_OBX.view(whole).squeeze(-1).T.contiguous()


def _group_of_places(weight: PackedWeight, run: int, count: int) -> Tensor:
    """The groups of `count` runs of inputs."""
    places = weight.first + run * torch.arange(count, device=weight.scale_OG.device)
    return places // weight.group - weight.first // weight.group


def _for_masked_integers(scale_OBRP: Tensor) -> Tensor:
    """Scales of codes that are 2^-133 and, in every second plane, 2^-129 of themselves."""
    sizes = torch.tensor([2.0**112, 2.0**108, 2.0**112, 2.0**108], device=scale_OBRP.device)
    return (scale_OBRP * sizes).to(torch.bfloat16)


def _as_bits_of_bfloat16(scale_OBRP: Tensor) -> Tensor:
    """Eight bits of each scale, that of a kernel's number between three ones and four zeros, in an int32 for four.

    The lower half of a register holds scales 0 and 1, the upper one scales 2 and 3: of the even ones the bits lie in
    place, of the odd ones where they are when the two bytes of the half change places.
    """
    bits_OBRP = (scale_OBRP * E2M1_SCALE).to(torch.bfloat16).view(torch.int16).to(torch.int32) >> 4 & 255
    bits_OBRP = torch.where(scale_OBRP > 0, bits_OBRP, 0)
    even, odd = bits_OBRP[..., 0::2], bits_OBRP[..., 1::2]
    return (even << 4 | odd >> 4 | (odd & 15) << 12).to(torch.int16)


_SCALES: Mapping[CodeName, Callable[[Tensor], Tensor]] = {
    "int4": _for_masked_integers,
    "nvfp4": _as_bits_of_bfloat16,
}


def _factor(weight: PackedWeight, tiling: Tiling, unit: Unit) -> Tensor:
    factor_O = torch.full((weight.num_out,), unit.factor, device=weight.codes_OW.device)
    if tiling.scaling is Scaling.ROW:
        factor_O = factor_O * weight.scale_OG[:, 0].float()
    if weight.row_scale_O is not None:
        factor_O = factor_O / weight.row_scale_O if weight.row_scale_divides else factor_O * weight.row_scale_O
    return factor_O
