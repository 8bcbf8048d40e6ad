"""What an expression of PromQL asks for: each metric, with the labels that it must have."""

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser as ast

GIVEN = frozenset({"job", "instance", "le"})
"""Labels that Prometheus gives each target, or a histogram its buckets."""


@dataclass(frozen=True)
class MetricQuery:
    """A metric, the labels that it must have, and the values of them that it is matched by."""

    name: str
    labels: frozenset[str]
    values: tuple[tuple[str, str], ...]


def metric_queries(expression: str) -> list[MetricQuery]:
    """All that an expression asks for.

    Raises:
        ValueError: it is no PromQL.
    """
    return list(_walk(ast.parse(expression), frozenset()))


def _walk(node: ast.Expr, labels: frozenset[str]) -> Iterator[MetricQuery]:
    """`labels` are those that all of it must have."""
    match node:
        case ast.VectorSelector():
            assert node.name, "every selector names its metric"
            matchers = node.matchers.matchers
            values = tuple((each.name, value) for each in matchers for value in each.value.split("|"))
            yield MetricQuery(node.name, labels | {each.name for each in matchers}, values)
        case ast.MatrixSelector():
            yield from _walk(node.vector_selector, labels)
        case ast.AggregateExpr():
            by = node.modifier
            assert by is None or by.type == ast.AggModifierType.By, "groups are named"
            yield from _walk(node.expr, frozenset(by.labels if by else ()))
        case ast.BinaryExpr():
            brought, matched = _join(node)
            yield from _walk(node.lhs, (labels - brought) | matched)
            yield from _walk(node.rhs, (labels & brought if brought else labels) | brought | matched)
        case ast.Call():
            for argument in node.args:
                yield from _walk(argument, labels)
        case ast.ParenExpr() | ast.UnaryExpr():
            yield from _walk(node.expr, labels)
        case ast.NumberLiteral() | ast.StringLiteral():
            return
        case _:
            raise AssertionError(f"{type(node).__name__} is not known here")


def _join(node: ast.BinaryExpr) -> tuple[frozenset[str], frozenset[str]]:
    """Labels that the right side brings (`group_left`), and those that both sides are matched by (`on`)."""
    how = node.modifier
    if how is None:
        return frozenset(), frozenset()
    assert how.card != ast.VectorMatchCardinality.OneToMany, "the one side stands on the right"
    on = how.matching
    matched = on.labels if on is not None and on.type == ast.LabelModifierType.Include else ()
    return frozenset(how.group_labels or ()), frozenset(matched)
