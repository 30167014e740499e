from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from backquant.lower import engine_info
from backquant.lower.rule import LowerRule, index_rules, site_of, steps_of
from backquant.nn import intrinsic
from backquant.nn.quantized import reference as nnqr

ENGINE = engine_info("x86")


def _rule(*pattern):
    return LowerRule("rule", pattern, lambda site: None)


def _node(gm, name):
    return next(node for node in gm.graph.nodes if node.name == name)


def test_fused_modules_count_as_several_operators(tools):
    conv = nn.Conv2d(2, 2, 1)
    children = {
        "pair": intrinsic.ConvReLU2d(conv, nn.ReLU()),
        "total": intrinsic.ConvAddReLU2d(conv, torch.add, nn.ReLU()),
        "plain": nn.ReLU(),
    }
    gm = tools.trace(lambda self, x, y: self.plain(self.total(self.pair(x), y)), **children)
    keys = [
        tuple(s.key for s in steps_of(gm, _node(gm, name))) for name in ("pair", "total", "plain")
    ]
    assert keys == [(nn.Conv2d, nn.ReLU), (nn.Conv2d, torch.add, nn.ReLU), (nn.ReLU,)]
    assert steps_of(gm, _node(gm, "x")) == ()


def test_a_pattern_spans_nodes_and_fused_modules_but_never_cuts_one(tools):
    def forward(self, x):
        return tools.qdq(self.pair(tools.qdq(x, tools.u8)), tools.u8)

    conv = nn.Conv2d(2, 2, 1)
    fused = intrinsic.ConvReLU2d(conv, nn.ReLU())
    fused[0] = nnqr.Conv2d.from_float(conv, tools.weight_qparams(conv))
    gm = tools.trace(forward, pair=fused)
    node = _node(gm, "pair")
    site = site_of(gm, steps_of(gm, node), _rule((nnqr.Conv2d,), (nn.ReLU,)), ENGINE)
    assert site is not None
    assert site.nodes == (node,) and site.module is fused[0]
    assert site.out == tools.u8
    assert site_of(gm, steps_of(gm, node), _rule((nnqr.Conv2d,)), ENGINE) is None


def test_a_chain_ends_where_something_else_reads(tools):
    def forward(self, x, y):
        a = torch.add(x, y)
        return F.relu(a), torch.mul(y, F.relu(x + 1))

    gm = tools.trace(forward)
    rule = _rule((torch.add,), (F.relu,))
    assert site_of(gm, steps_of(gm, _node(gm, "add")), rule, ENGINE) is not None
    shared = tools.trace(lambda self, x, y: (F.relu(x + y) + (x + y), torch.add(x, y)))
    assert (
        site_of(
            shared, steps_of(shared, _node(shared, "add_3")), _rule((torch.add,), (F.relu,)), ENGINE
        )
        is None
    )

    def two_readers(self, x):
        a = torch.add(x, 1)
        return F.relu(a) + a

    gm = tools.trace(two_readers)
    assert site_of(gm, steps_of(gm, _node(gm, "add")), rule, ENGINE) is None


def test_the_follower_must_read_the_value_first(tools):
    gm = tools.trace(lambda self, x, y: torch.mul(y, torch.add(x, y)))
    assert (
        site_of(gm, steps_of(gm, _node(gm, "add")), _rule((torch.add,), (torch.mul,)), ENGINE)
        is None
    )


def test_the_quantize_node_counts_only_if_it_is_the_only_reader(tools):
    def forward(self, x):
        y = torch.add(x, 1)
        return tools.qdq(y, tools.u8), y

    gm = tools.trace(forward)
    site = site_of(gm, steps_of(gm, _node(gm, "add")), _rule((torch.add,)), ENGINE)
    assert site is not None
    assert site.out is None and site.quantize is None


def test_longer_patterns_come_first_then_the_order_of_the_table():
    one, two, three = _rule((F.relu,)), _rule((F.relu,)), _rule((F.relu,), (F.relu,))
    assert index_rules((one, two, three))[F.relu] == [three, one, two]
