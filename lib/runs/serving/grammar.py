"""What a client's ``response_format`` means: a grammar in llguidance's own form, which the engine's forms follow."""

import json
from typing import Any

from lib.runs.serving.schema import ApiError, ResponseFormat, shorter

LONGEST = 200  # characters of the library's complaint that a client is told
WHITESPACE: Any = {"whitespace_pattern": r"[ \n]{0,8}"}  # between JSON's marks; unbounded, a model may write no more


def grammar_of(asked: ResponseFormat) -> str:
    """The grammar of a JSON schema or a regular expression.

    Raises:
        ApiError: the schema or the expression is wrong, or llguidance is not installed.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        text = "response_format: this server has no llguidance; pip install 'scaling-workbook[serve]'"
        raise ApiError(400, text, param="response_format") from None
    if asked.type == "regex":
        grammar = LLMatcher.grammar_from_regex(str(asked.pattern))
    else:
        schema = asked.json_schema.schema_ if asked.json_schema else {"type": "object"}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=WHITESPACE)
    if why := LLMatcher.validate_grammar(grammar):
        raise ApiError(400, f"response_format: {shorter(' '.join(why.split()), LONGEST)}", param="response_format")
    return grammar
