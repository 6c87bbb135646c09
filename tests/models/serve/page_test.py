"""The page in a real browser, where there is one: it is typed and clicked."""

import contextlib
import json
import shutil
import socket
import subprocess
import time

import httpx
import pytest
import tiny
import tiny_drafters
import tiny_served

pytestmark = pytest.mark.skipif(
  not (shutil.which('chromium') and shutil.which('chromedriver')),
  reason='there is no Chromium with its driver',
)

_FLAGS = (
  'headless',
  'no-sandbox',
  'disable-gpu',
  'disable-quic',
  'no-first-run',
  'disable-background-networking',
  'disable-component-update',
  'disable-sync',
  'window-size=900,700',
)


class _Browser:
  """A browser by the WebDriver protocol."""

  def __init__(self, http):
    self._http = http

  def ask(self, path, **body):
    reply = self._http.post(path, json=body).json()['value']
    assert not (isinstance(reply, dict) and 'error' in reply), reply
    return reply

  def run(self, script):
    return self.ask('/execute/sync', script=f'return {script}', args=[])

  def wait(self, script):
    end = time.monotonic() + 60
    while not self.run(script):
      assert time.monotonic() < end, self.run('document.body.innerText')
      time.sleep(0.05)

  def on(self, selector, action, **body):
    answer = self.ask('/element', using='css selector', value=selector)
    (element,) = answer.values()
    self.ask(f'/element/{element}/{action}', **body)

  def texts(self, selector):
    return self.run(
      f'[...document.querySelectorAll({json.dumps(selector)})]'
      '.map(one => one.textContent)'
    )


@contextlib.contextmanager
def _browsing(lm, folder):
  """A browser that shows the page of a server."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    url = f'http://127.0.0.1:{free.getsockname()[1]}'
  command = ['chromedriver', f'--port={url.rpartition(":")[2]}']
  driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  flags = [f'--{flag}' for flag in _FLAGS] + [f'--user-data-dir={folder}']
  wanted = {'alwaysMatch': {'goog:chromeOptions': {'args': flags}}}
  retries = httpx.HTTPTransport(retries=9)  # Until the driver listens.
  try:
    with (
      tiny_served.serving(lm) as server,
      httpx.Client(transport=retries, timeout=60) as http,
    ):
      begun = http.post(f'{url}/session', json={'capabilities': wanted})
      session = f'{url}/session/{begun.json()["value"]["sessionId"]}'
      http.base_url = session
      browser = _Browser(http)
      browser.ask('/url', url=server.address)
      browser.wait('at("model").textContent === "tiny"')
      browser.run('at("limit").value = 9')
      yield browser
      http.delete(session)
  finally:
    driver.terminate()
    driver.wait()


def _generator(template):
  draft = tiny.draft('similar', num_layers=1)
  drafter = tiny_drafters.simple('staged', draft)
  return tiny_served.generator(tiny.gpt2(num_layers=1), drafter, template)


def test_a_chat_shows_who_proposed_what_and_proves_it(tmp_path):
  lm = _generator(tiny_served.TEMPLATE)
  messages = [{'role': 'user', 'content': 'abc'}]
  options = {'max_new_tokens': 9, 'room_for_new_tokens': 48}
  first = lm.generate([messages], **options).text[0]
  messages += [
    {'role': 'assistant', 'content': first},
    {'role': 'user', 'content': 'de'},
  ]
  second = lm.generate([messages], **options).text[0]
  with _browsing(lm, tmp_path) as browser:
    for number, (text, answer) in enumerate((('abc', first), ('de', second))):
      browser.on('#prompt', 'value', text=text)
      browser.on('#send', 'click')
      browser.wait(
        'document.querySelectorAll(".prove").length === 1'
        f' && document.querySelectorAll("section").length === {number + 1}'
      )
      assert browser.texts('.asked')[-1] == text
      assert browser.texts('.answer')[-1] == answer
      browser.on('.prove', 'click')
      browser.wait(
        '[...document.querySelectorAll(".proof")].at(-1)'
        '?.textContent.endsWith("✓")'
      )
    assert 'per forward of the target' in browser.texts('.figures')[0]
    origins = browser.run(
      '[...document.querySelectorAll(".answer .token")]'
      '.map(one => [one.dataset.origin, one.style.background])'
    )
    assert {origin for origin, _ in origins} >= {'target', 'draft'}
    assert len({background for _, background in origins}) > 1
    browser.run('at("limit").value = -1')
    browser.on('#prompt', 'value', text='f')
    browser.on('#send', 'click')
    browser.wait('document.querySelector(".error")')
    assert 'max_tokens must be' in browser.texts('.error')[0]
    browser.on('#new', 'click')
    assert browser.texts('section') == []


def test_a_model_without_a_chat_goes_on_with_a_text(tmp_path):
  """Plainly, too, which says first that it compiles."""
  lm = _generator(template=None)
  expected = lm.generate('abc', max_new_tokens=9).text[0]
  with _browsing(lm, tmp_path) as browser:
    browser.run('at("prompt").value = "abc"')
    browser.on('#send', 'click')
    browser.wait('document.querySelector(".prove")')
    assert browser.texts('.answer') == [expected]
    browser.run('at("method").value = "plain"')
    # A script ends before the first part of an answer comes.
    said = '[...document.querySelectorAll(".figures")].at(-1).textContent'
    first = f'(at("form").requestSubmit(), {said})'
    assert 'the first time, this compiles' in browser.run(first)
    browser.wait('document.querySelectorAll(".prove").length === 2')
    assert browser.texts('.answer') == [expected] * 2
