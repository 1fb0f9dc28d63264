"""Help pages: options in groups, and the nearest command for a wrong one."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from flatness.cli.answers import UsageError
from flatness.errors import check_known


class _Paragraphs:
    """What a command does: paragraphs filled to the width, and examples as they are."""

    help: str | None

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write it."""
        for paragraph in (self.help or "").split("\n\n"):
            formatter.write_paragraph()
            with formatter.indentation():
                if paragraph.startswith("Example:"):
                    indent = " " * formatter.current_indent
                    formatter.write("".join(f"{indent}{line}\n" for line in paragraph.splitlines()))
                else:
                    formatter.write_text(paragraph)


class Group(_Paragraphs, TyperGroup):
    """Commands under one word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words, where none at all ask for help."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names."""
        word = args[0]
        if self.get_command(ctx, word) is None and not word.startswith("-") and not ctx.resilient_parsing:
            check_known(word, self.list_commands(ctx), "a command", UsageError)
        return super().resolve_command(ctx, args)


class Command(_Paragraphs, TyperCommand):
    """A command whose help shows its options in groups (their ``rich_help_panel``)."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What the first line shows: not what is only taken to be refused in words."""
        shown = [one for one in self.get_params(ctx) if not getattr(one, "hidden", False)]
        return [self.options_metavar or "", *(piece for one in shown for piece in one.get_usage_pieces(ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, group by group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                if parameter.param_type_name == "argument":
                    name, record = "Arguments", (parameter.metavar or record[0], record[1])
                else:
                    name = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
