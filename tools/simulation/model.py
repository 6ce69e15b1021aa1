"""A GPT as Megatron-Core shards it: the tensors of a model and its optimizer, and which rank holds what of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megackpt.planning.box import Boxes, Int64
from megackpt.planning.manifest import (
    COMMON_KEY,
    ITEMSIZE,
    NOMINAL_OBJECT,
    OBJECT,
    Declarations,
    TensorEntry,
    TensorMeta,
)
from simulation.parallelism import ANY, Parallelism, Places, grid_pieces

STATES = ("fp32_param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Weight:
    """One parameter. ``cut``: the axis that tensor-parallel ranks share; ``pieces`` of it go to each of them."""

    key: str
    shape: tuple[int, ...]
    cut: int | None = None
    pieces: int = 1
    layer: int | None = None
    first: bool = False  # on the first pipeline stage
    last: bool = False
    experts: bool = False  # axis 0 counts experts


@dataclass(frozen=True)
class Model:
    """The shape of a GPT. ``optimizer``: "adam" (fp32 master weights and two moments) or "none"."""

    layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    vocabulary: int = 128_256
    experts: int = 0
    gated: bool = True
    dtype: str = "bfloat16"
    optimizer: str = "adam"
    distributed: bool = (
        True  # the optimizer's state is cut over the data-parallel ranks (ZeRO-1)
    )

    def __post_init__(self) -> None:
        sizes = (
            self.layers,
            self.hidden,
            self.ffn,
            self.heads,
            self.groups,
            self.vocabulary,
        )
        if min(sizes) < 1 or self.experts < 0:
            raise ValueError("sizes must be positive")
        if self.hidden % self.heads or self.heads % self.groups:
            raise ValueError(
                "heads must divide the hidden size, and query groups the heads"
            )
        if self.dtype not in ITEMSIZE or self.dtype == OBJECT:
            raise ValueError(
                f"unknown dtype {self.dtype!r}; one of {', '.join(sorted({*ITEMSIZE} - {OBJECT}))}"
            )
        if self.optimizer not in ("adam", "none"):
            raise ValueError(f"unknown optimizer {self.optimizer!r}; adam or none")

    def padded(self, tensor: int, multiple: int = 128) -> Model:
        """With the vocabulary padded as Megatron does: to a multiple that all tensor-parallel ranks share evenly."""
        unit = multiple * tensor
        return replace(self, vocabulary=-(-self.vocabulary // unit) * unit)

    def weights(self) -> Iterator[Weight]:
        words = (self.vocabulary, self.hidden)
        yield Weight("embedding.word_embeddings.weight", words, 0, first=True)
        for layer in range(self.layers):
            yield from self._layer(layer)
        yield Weight("decoder.final_layernorm.weight", (self.hidden,), last=True)
        yield Weight("output_layer.weight", words, 0, last=True)

    def _layer(self, layer: int) -> Iterator[Weight]:
        name, hidden = f"decoder.layers.{layer}.", self.hidden
        queries, halves = (
            hidden // self.heads * (self.heads + 2 * self.groups),
            2 if self.gated else 1,
        )
        attention, mlp = name + "self_attention.", name + "mlp."
        yield Weight(attention + "linear_qkv.layer_norm_weight", (hidden,), layer=layer)
        yield Weight(attention + "linear_qkv.weight", (queries, hidden), 0, layer=layer)
        yield Weight(attention + "linear_proj.weight", (hidden, hidden), 1, layer=layer)
        if not self.experts:
            yield Weight(mlp + "linear_fc1.layer_norm_weight", (hidden,), layer=layer)
            yield Weight(
                mlp + "linear_fc1.weight", (halves * self.ffn, hidden), 0, halves, layer
            )
            yield Weight(mlp + "linear_fc2.weight", (hidden, self.ffn), 1, layer=layer)
            return
        inner, outer = (
            (self.experts, halves * self.ffn, hidden),
            (self.experts, hidden, self.ffn),
        )
        yield Weight(name + "pre_mlp_layernorm.weight", (hidden,), layer=layer)
        yield Weight(mlp + "router.weight", (self.experts, hidden), layer=layer)
        yield Weight(
            mlp + "experts.experts.linear_fc1.weight",
            inner,
            1,
            halves,
            layer,
            experts=True,
        )
        yield Weight(
            mlp + "experts.experts.linear_fc2.weight",
            outer,
            2,
            layer=layer,
            experts=True,
        )

    def declared(self, job: Parallelism) -> list[Declarations]:
        """What every rank declares. A replica is what differs neither by tensor nor by data rank."""
        if self.experts % job.expert:
            raise ValueError(
                f"expert parallelism {job.expert} does not divide {self.experts} experts"
            )
        places, tensors = Places(job), []
        for weight in self.weights():
            tensors.append(
                TensorEntry(weight.key, TensorMeta(weight.shape, self.dtype))
            )
            self._place(
                places, len(tensors) - 1, weight, tensors[-1].meta, cut_over_data=False
            )
        for weight in self.weights() if self.optimizer == "adam" else ():
            for state in STATES:
                meta = TensorMeta(weight.shape, "float32")
                tensors.append(
                    TensorEntry(f"optimizer.state.{state}.{weight.key}", meta)
                )
                self._place(places, len(tensors) - 1, weight, meta, self.distributed)
        tensors.append(TensorEntry(COMMON_KEY, TensorMeta((), OBJECT)))
        one = Boxes(np.zeros((1, 0), np.int64), np.ones((1, 0), np.int64))
        places.add(len(tensors) - 1, one, NOMINAL_OBJECT, stage=0, tensor=0, data=0)
        return places.parts(tensors)

    def _place(
        self,
        places: Places,
        number: int,
        weight: Weight,
        meta: TensorMeta,
        cut_over_data: bool,
    ) -> None:
        """Pieces of one tensor; with ``cut_over_data`` each rank's piece is cut once more, as ZeRO-1 does."""
        job = places.job
        pieces = [
            weight.shape[0] if weight.experts else 1,
            *[1] * (len(weight.shape) - 1),
        ]
        if weight.cut is not None:
            pieces[weight.cut] = min(
                job.tensor * weight.pieces, weight.shape[weight.cut]
            )
        copies, leading = 1, int(weight.experts)
        if cut_over_data:
            replicas = job.data // job.expert if weight.experts else job.data
            copies = max(1, min(replicas, weight.shape[leading] // pieces[leading]))
            pieces[leading] *= copies
        boxes, which = grid_pieces(weight.shape, pieces)
        expert: int | Int64 = (
            which[0] * job.expert // weight.shape[0] if weight.experts else ANY
        )
        data: int | Int64 = ANY
        if copies > 1:
            data = which[leading] % copies
            which[leading] //= copies
            data = data * job.expert + expert if weight.experts else data
        places.add(
            number,
            boxes,
            boxes.volume * meta.itemsize,
            stage=self._stage(weight, job.pipeline),
            expert=expert,
            tensor=ANY if weight.cut is None else which[weight.cut] % job.tensor,
            data=data,
        )

    def _stage(self, weight: Weight, stages: int) -> int:
        if weight.layer is not None:
            return weight.layer * stages // self.layers
        return stages - 1 if weight.last else 0
