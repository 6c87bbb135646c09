"""The page in a real browser, where there is one: it is typed and clicked."""

import contextlib
import json
import os
import pathlib
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
    while not (found := self.run(script)):
      assert time.monotonic() < end, self.run('document.body.innerText')
      time.sleep(0.05)
    return found

  def click(self, selector):
    (element,) = self.ask(
      '/element', using='css selector', value=selector
    ).values()
    self.ask(f'/element/{element}/click')

  def type(self, selector, text):
    (element,) = self.ask(
      '/element', using='css selector', value=selector
    ).values()
    self.ask(f'/element/{element}/value', text=text)

  def texts(self, selector):
    return self.run(
      f'[...document.querySelectorAll({json.dumps(selector)})]'
      '.map(one => one.textContent)'
    )


@contextlib.contextmanager
def _browsing(address, folder):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  driver = subprocess.Popen(
    ['chromedriver', f'--port={port}'], stdout=subprocess.DEVNULL
  )
  flags = [f'--{flag}' for flag in _FLAGS] + [f'--user-data-dir={folder}']
  wanted = {'goog:chromeOptions': {'args': flags}}
  try:
    with httpx.Client(base_url=f'http://127.0.0.1:{port}', timeout=60) as http:
      while True:
        with contextlib.suppress(httpx.ConnectError):
          body = {'capabilities': {'alwaysMatch': wanted}}
          session = http.post('/session', json=body).json()['value']
          break
        time.sleep(0.05)
      http.base_url = f'{http.base_url}/session/{session["sessionId"]}'
      browser = _Browser(http)
      browser.ask('/url', url=address)
      yield browser
      # Without the slash that a relative path would end with.
      http.delete(str(http.base_url).rstrip('/'))
  finally:
    driver.terminate()
    driver.wait()


def _generator(template):
  draft = tiny.draft('similar', num_layers=1)
  drafter = tiny_drafters.simple('staged', draft)
  return tiny_served.generator(tiny.gpt2(num_layers=1), drafter, template)


def _shown(browser):
  """A picture for people, where `PICTURES` names a folder."""
  if folder := os.environ.get('PICTURES'):
    import base64

    picture = browser._http.get('/screenshot').json()['value']
    path = pathlib.Path(folder) / f'page_{time.time()}.png'
    path.write_bytes(base64.b64decode(picture))


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
  with (
    tiny_served.serving(lm) as server,
    _browsing(server.address, tmp_path) as browser,
  ):
    browser.wait('at("model").textContent === "tiny"')
    browser.run('at("limit").value = 9')
    for number, (text, answer) in enumerate((('abc', first), ('de', second))):
      browser.type('#prompt', text)
      browser.click('#send')
      browser.wait(
        f'document.querySelectorAll(".prove").length === {1}'
        f' && document.querySelectorAll("section").length === {number + 1}'
      )
      assert browser.texts('.asked')[-1] == text
      assert browser.texts('.answer')[-1] == answer
      browser.click('.prove')
      browser.wait('!document.querySelector(".prove")')
      browser.wait(
        '[...document.querySelectorAll(".proof")].at(-1)'
        '.textContent.endsWith("✓")'
      )
    figures = ' '.join(browser.texts('.figures'))
    assert 'per forward of the target' in figures
    origins = browser.run(
      '[...document.querySelectorAll(".answer .token")]'
      '.map(one => [one.dataset.origin, one.style.background])'
    )
    assert {origin for origin, _ in origins} >= {'target', 'draft'}
    assert len({background for _, background in origins}) > 1
    _shown(browser)
    browser.run('at("limit").value = -1')
    browser.type('#prompt', 'f')
    browser.click('#send')
    browser.wait('document.querySelector(".error")')
    assert 'max_tokens must be' in browser.texts('.error')[0]
    browser.click('#new')
    assert browser.texts('section') == []


def test_a_model_without_a_chat_goes_on_with_a_text(tmp_path):
  lm = _generator(template=None)
  expected = lm.generate('abc', max_new_tokens=9).text[0]
  with (
    tiny_served.serving(lm) as server,
    _browsing(server.address, tmp_path) as browser,
  ):
    browser.wait('at("model").textContent === "tiny"')
    browser.run('at("limit").value = 9')
    browser.run('at("prompt").value = "abc"')
    browser.click('#send')
    browser.wait('document.querySelector(".prove")')
    assert browser.texts('.answer') == [expected]
    _shown(browser)
