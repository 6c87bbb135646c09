"""Makes tests/golden/schemas.jsonl: schemas of the JSON Schema test suite.

A line is a schema, and values with whether they conform to it. The suite is in
the source distribution of jsonschema, in its folder `json`:

  python tests/golden/make_schemas.py jsonschema-4.26.0/json
"""

import json
import pathlib
import sys


def _line(group):
  schema = group['schema']
  if isinstance(schema, dict):
    schema = {key: schema[key] for key in schema if key != '$schema'}
  values = [[test['data'], test['valid']] for test in group['tests']]
  return json.dumps([schema, values], separators=(',', ':')) + '\n'


def main():
  suite = pathlib.Path(sys.argv[1]) / 'tests/draft2020-12'
  files = [*suite.glob('*.json'), *suite.glob('optional/format/*.json')]
  path = pathlib.Path(__file__).with_name('schemas.jsonl')
  with path.open('w') as file:
    for source in sorted(files):
      file.writelines(map(_line, json.loads(source.read_text('utf-8'))))


if __name__ == '__main__':
  main()
