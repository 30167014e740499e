"""What a reference model knows about itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from backquant.calibrate import calibrate
from backquant.convert import ReferenceModel, convert_to_reference, reference_state
from backquant.errors import UsageError


@pytest.fixture
def reference(flow):
    model, batches = flow.model("squeeze_excite")
    prepared = flow.prepare(model)
    calibrate(prepared, batches)
    return convert_to_reference(prepared), batches


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_it(reference, copied):
    model, batches = reference
    again = copied(model)
    assert isinstance(again, ReferenceModel)
    one, two = reference_state(model), reference_state(again)
    assert one.plan == two.plan
    assert one.sites == two.sites
    assert one.provenance == two.provenance
    assert one.qparams.keys() == two.qparams.keys()
    with torch.no_grad():
        for first, second in zip(model(batches[0]), again(batches[0]), strict=True):
            assert torch.equal(first, second)


def test_new_nodes_stand_for_captured_ones(reference):
    model, _ = reference
    state = reference_state(model)
    captured = set(state.scopes)
    for node in model.graph.nodes:
        if node.op not in ("placeholder", "output", "get_attr"):
            assert set(state.provenance.origins(node.name)) <= captured, node.name


def test_qparams_are_those_in_the_graph(reference):
    model, _ = reference
    op = torch.ops.quantized_decomposed.quantize_per_tensor.default
    written = [node.args[1:3] for node in model.graph.nodes if node.target is op]
    state = reference_state(model)
    known = [(found.number.scale, found.number.zero_point) for found in state.qparams.values()]
    assert sorted(written) == sorted(known)
    assert list(state.qparams) == [site.name for site in state.sites.sites]


def test_other_modules_have_none():
    with pytest.raises(UsageError, match="not a reference model"):
        reference_state(torch.nn.ReLU())
