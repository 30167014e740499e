"""Calls whose arguments are called otherwise, or mean something else, in today's functions."""

from __future__ import annotations

import libcst as cst

from backquant.migrate.by_hand import ByHand
from backquant.migrate.changes import Edit
from backquant.migrate.configs import ConfigArgument, config_arguments, literal_of
from backquant.migrate.decisions import Decisions, Resolved
from backquant.migrate.names import RENAMED_CALLS
from backquant.migrate.patterns import report_dict_patterns, report_patterns
from backquant.migrate.setters import KEYS, string_keys
from backquant.migrate.signatures import CONFIGS, KEYWORDS, SIGNATURES, Signature

_REFERENCE = "backquant.convert_to_reference_fx"
_DECOMPOSED = "_convert_to_reference_decomposed_fx"
#: Arguments that are no parameters of PyTorch 2: rewritten, or backquant's own.
_KNOWN_HERE = ("is_reference", "dialect")
_FLAG = ByHand(
    "arguments",
    "whether this is the reference model is decided by a value at run time",
    "call convert_to_reference_fx(prepared) or convert_fx(prepared)",
)
_EXAMPLES = ByHand(
    "arguments",
    "example_inputs is required since PyTorch 1.13; the position was that of "
    "prepare_custom_config before",
    "prepare_fx(model, qconfig_mapping, example_inputs=(torch.randn(…),), …)",
)


def rewrite_calls(decisions: Decisions) -> None:
    """Rewrite the calls of functions that have changed; report what cannot be rewritten."""
    configs: list[ConfigArgument] = []
    renamed: list[cst.Call] = []
    for resolved in decisions.resolved:
        _report_from_dict(decisions, resolved)
        call = decisions.names.parents.get(resolved.node)
        if not isinstance(call, cst.Call) or call.func is not resolved.node:
            continue
        if resolved.target in SIGNATURES:
            configs += _Call(decisions, resolved, call).rewrite()
        if resolved.fate.symbol in RENAMED_CALLS:
            renamed.append(call)
        report_patterns(decisions, resolved, call)
    mappings = config_arguments(decisions, configs)
    for call in renamed:
        if call not in mappings:
            decisions.changes.edit(call, _to_dict)


def _report_from_dict(decisions: Decisions, resolved: Resolved) -> None:
    """``BackendConfig.from_dict({…})``: its patterns may be in reversed order."""
    parents = decisions.names.parents
    method = parents.get(resolved.node)
    call = None if method is None else parents.get(method)
    if (
        resolved.target in ("backquant.BackendConfig", "backquant.BackendPatternConfig")
        and isinstance(method, cst.Attribute)
        and method.attr.value == "from_dict"
        and isinstance(call, cst.Call)
        and call.args
    ):
        literal = literal_of(decisions.names, call.args[0].value)
        if literal is not None:
            report_dict_patterns(decisions, literal)


def _to_dict(updated: cst.Call) -> cst.Call:
    return cst.Call(cst.Attribute(updated, cst.Name("to_dict")))


class _Call:
    """One call of a function of the flow."""

    def __init__(self, decisions: Decisions, resolved: Resolved, call: cst.Call) -> None:
        self.decisions = decisions
        self.resolved = resolved
        self.call = call
        self.name = resolved.target.rpartition(".")[2]
        self.dropped: set[cst.Arg] = set()

    def rewrite(self) -> list[ConfigArgument]:
        """Rename keywords, drop what has gone, and give the arguments that are configs."""
        signature = SIGNATURES[self.resolved.target]
        known = self._by_parameter(signature)
        self._example_inputs(signature, known)
        if "is_reference" in known:
            self._is_reference(known["is_reference"])
        if self.resolved.fate.symbol == _DECOMPOSED:
            self.decisions.changes.edit(self.call, _decomposed)
        configs = []
        for parameter, argument in known.items():
            if parameter in signature.missing and not _is_none(argument.value):
                self._report_missing(parameter, argument, signature)
            elif parameter not in (*signature.parameters, *_KNOWN_HERE):
                why = ByHand("arguments", f"{self.name} has no {parameter}", "remove it")
                self.decisions.report(argument, f"{self.name} with {parameter}", why)
            elif parameter in CONFIGS:
                cls = CONFIGS[parameter]
                configs.append(ConfigArgument(cls, argument.value, self.resolved))
        if self.dropped:
            self.decisions.changes.edit(self.call, self._without_dropped())
        return configs

    def _by_parameter(self, signature: Signature) -> dict[str, cst.Arg]:
        """The arguments by today's parameter; older keywords are renamed on the way."""
        known: dict[str, cst.Arg] = {}
        for index, argument in enumerate(self.call.args):
            if argument.star:
                continue
            if argument.keyword is None:
                if index < len(signature.parameters) and not self._stars_before(index):
                    known[signature.parameters[index]] = argument
                continue
            old = argument.keyword.value
            new = KEYWORDS.get(old, old)
            known[new] = argument
            if new != old and new in signature.parameters:
                self.decisions.changes.edit(argument, _keyword(new))
        return known

    def _stars_before(self, index: int) -> bool:
        return any(argument.star for argument in self.call.args[:index])

    def _example_inputs(self, signature: Signature, known: dict[str, cst.Arg]) -> None:
        if "example_inputs" not in signature.required:
            return
        given = known.get("example_inputs")
        if given is None and not any(argument.star for argument in self.call.args):
            self.decisions.report(self.call, f"{self.name} without example_inputs", _EXAMPLES)
        elif given is not None and set(string_keys(given.value) or ()) & set(
            KEYS["PrepareCustomConfig"]
        ):
            self.decisions.report(given, f"{self.name} with a custom config third", _EXAMPLES)

    def _is_reference(self, argument: cst.Arg) -> None:
        """``convert_fx(prepared, is_reference=True)`` is a function of its own since 1.13."""
        value = argument.value.value if isinstance(argument.value, cst.Name) else ""
        if value not in ("True", "False"):
            self.decisions.report(argument, f"{self.name} with is_reference", _FLAG)
            return
        self.dropped.add(argument)
        if value == "True":
            code = self.resolved.spelled(_REFERENCE)
            self.decisions.changes.edit(self.resolved.node, lambda _: cst.parse_expression(code))

    def _report_missing(self, parameter: str, argument: cst.Arg, signature: Signature) -> None:
        why = ByHand("arguments", f"{self.name} has no {parameter}", signature.missing[parameter])
        self.decisions.report(argument, f"{self.name} with {parameter}", why)

    def _without_dropped(self) -> Edit:
        kept = [i for i, argument in enumerate(self.call.args) if argument not in self.dropped]

        def edit(updated: cst.Call) -> cst.Call:
            arguments = [updated.args[i] for i in kept]
            if arguments and len(updated.args) - 1 not in kept:
                arguments[-1] = arguments[-1].with_changes(comma=updated.args[-1].comma)
            return updated.with_changes(args=arguments)

        return edit


def _is_none(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Name) and value.value == "None"


def _keyword(name: str) -> Edit:
    return lambda updated: updated.with_changes(keyword=cst.Name(name))


def _decomposed(updated: cst.Call) -> cst.Call:
    dialect = cst.ensure_type(cst.parse_expression('f(dialect="decomposed")'), cst.Call).args[0]
    arguments = list(updated.args)
    if arguments and not isinstance(arguments[-1].comma, cst.Comma):
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        arguments[-1] = arguments[-1].with_changes(comma=comma)
    return updated.with_changes(args=[*arguments, dialect])
