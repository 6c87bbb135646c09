"""An endpoint with OpenAI's interface; a page to try it is at its address.

python scripts/serve.py --target=my/instruct --draft=my/smaller --port=8000

Ctrl-C ends open streams, and then the server.
"""

import contextlib

from absl import flags
import command_line
import options
import several_hosts

options.define_method()
_BATCH_SIZE = options.define_batch_size(4, 'requests that are decoded at once')
_QUEUE_SIZE = flags.DEFINE_integer(
  'queue_size', 64, 'requests that may wait; others get the status 429', 0
)
_CONTEXT, _READING = options.define_slots()
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'the address to listen at')
_PORT = flags.DEFINE_integer('port', 8000, 'the port, 0: a free one', 0, 65535)
_API_KEY = flags.DEFINE_string('api_key', None, 'that clients must send')
several_hosts.refuse('requests come to one host; leave it out')


def main() -> None:
  import loading

  from specdec.models import extras
  from specdec.models import waiting

  try:
    from specdec.models.serve import app
  except ImportError as error:
    raise ValueError(
      f'the package {error.name} is needed: {extras.command("serve")}'
    ) from error
  from specdec.models.serve import asked
  from specdec.models.serve import engine as engine_lib

  sample = lambda: [options.DEFAULT_PROMPT]
  generator, tree_sizes = loading.many(sample, _BATCH_SIZE.value)
  decoding = options.decoding()
  seed, limit = decoding.pop('seed'), decoding.pop('max_new_tokens')
  sampling = decoding.pop('sampling')
  engine = engine_lib.Engine(
    generator,
    method=loading.method(),
    batch_size=_BATCH_SIZE.value,
    context=_CONTEXT.value,
    queue_size=_QUEUE_SIZE.value,
    reading=_READING.value,
    tree_sizes=tree_sizes,
    **decoding,
  )
  reader = asked.Reader(
    engine,
    model=str(loading.models().target).rstrip('/').rpartition('/')[2],
    max_new_tokens=limit,
    sampling=sampling,
    seed=seed if options.SEED.present else None,
  )
  with waiting.announced('compiling'):
    engine.warm_up(sampling)
  server = app.Server(
    reader, host=_HOST.value, port=_PORT.value, api_key=_API_KEY.value
  )
  with contextlib.suppress(KeyboardInterrupt):  # After all streams have ended.
    server.run()
  engine.stop()
  engine.thread.join()


if __name__ == '__main__':
  command_line.run(main)
