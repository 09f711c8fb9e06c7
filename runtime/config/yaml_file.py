"""A YAML file as plain data. A key that is given twice is refused, where YAML's own loader would take the last one."""

from pathlib import Path
from typing import Any

import yaml

from runtime.errors import ConfigError

MERGE = "tag:yaml.org,2002:merge"  # of the key `<<`
SHOWN_CHARS = 80  # of a key that is refused


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Raises YAMLError for a key that is given twice. A key that `<<` brings may be given again."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in first:
                shown = key.value[:SHOWN_CHARS]
                raise yaml.YAMLError(f"line {line} gives {shown!r} again, which line {first[name]} gives: keep one")
            first[name] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Raises YAMLError for a node that is part of itself, which the loader finds where it builds the parts of a
        node before anything else."""
        return super().construct_object(node, deep=True)


def read_yaml(path: Path) -> Any:
    """Returns the data of a file, unchecked; an empty one gives no keys. Raises ConfigError when it is no YAML."""
    try:
        data = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error)) from error
    except RecursionError as error:
        raise ConfigError(str(path), "is nested deeper than any configuration") from error
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
    ) as error:  # `!!timestamp x` and the like
        raise ConfigError(str(path), f"not valid YAML: {error}") from error
    return data if data is not None else {}
