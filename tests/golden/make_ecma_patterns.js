// Which texts match patterns of ECMA-262, by the engine of Node.
//
// Writes a line for each pattern: the pattern; whether it is read with the flag
// `u`, without it, or not at all; characters; and a digit for each text of at
// most two of them, in order, or three where they are few: whether it matches.

const HAND = {
  'a1_-': [
    '^\\d$', '^\\D$', '^\\w+$', '^\\W$', '^[\\w-]{2}$', '^[^\\d]$', '\\d', '^a',
    'a$', '^a|1$', '(^|a)1', '^(?:a|1)*$', '^(?<x>a)1$', '^a{2}$', '^a{0,1}$',
    '^a{1,}$', '^a??1$', '^a+?$', '^[a-]$', '^[-a]$', '^\\x61$', '^\\u0061$',
    '^\\u{61}$', '^[\\w-_]$', '^[_-\\d]$', '^[^]$', '^[^]{2}$', '^\\-$', '^\\_$',
    '^[\\-_]$', '^[^-_]+$', '', '^', '$', '^$', '()', '|', 'a||1', '^^a$$',
    '[]a]', '[]', '^[]$', '[]|a', '\\Aa', 'a\\Z', 'a\\z', '(?i)a', '(?i:a)',
    '(?P<x>a)', '(?#a)1', '(?>a)', 'a{,2}', 'a++', 'a**', '*a', '^*', 'a{2,1}',
    '{1}', '(a', 'a)', '[a', 'a\\', '[z-a]', '\\u{110000}', '[1-\\d]', '\\a',
    '\\e', '\\h', '(?<1>a)', '(a)\\1', '\\ba', 'a(?=1)', '(?<!a)1', '(?x) a',
    '\\cA', '\\0', '\\01', '\\8', 'a{1', '\\N{DASH}', '\\G', '\\Q', '$a', 'a^',
    '(?:^a)+', '(?s).', 'x*', '^[\\b]$', '[\\B]', '\\u006', '\\x6', '\\u{}',
  ],
  'é٣K\u212aſß': [
    '^\\w$', '^\\W$', '^\\d$', '^\\D$', '^[^é]$', '^[é-ſ]$', '^.$', '\\u00e9',
    '^\\S$', '^[^\\W]$', '^[a-z]$', '^k$', '^\\é$',
  ],
  ' \t\r\n\v\x1c\x85\xa0\u180e\u2028\ufeff': [
    '^.$', '^\\s$', '^\\S$', '^[\\s]$', '^[^\\s]$', '^[\\S]$', '^[^\\n]$', ' $',
    '^\\v$', '^\\t|\\r$', '^\\cM$', '^\\cJ\\x0b$', '^[\\s\\S]$', '^[^]$', '.',
    '^[\\d\\s]$', '^\\n$', '\\n$',
  ],
  '😀é\ud7ff\ue000': [
    '^.$', '^..$', '^[😀]$', '^[^😀]$', '^\\ud83d\\ude00$', '^\\u{1f600}$', '😀?é',
    '^[\\ud83d\\ude00-\\u{1f601}]$', '^😀{2}$', '\\ud83d', '^[é-😀]$', '^\\W$',
    '^[\\ud000-\\uffff]$',
  ],
  'a{}],2\\/': [
    '^{$', '^}$', '^]$', '^a{$', '^{a}$', '^a{,$', '^a\\{,2\\}$', '^\\/$', '^/$',
    '^\\\\$', '^[\\]]$', '^[\\\\]$', '^\\{a$', '^[{}]$', '^[/]$', '^[^\\]]$',
    '^a{a,2}$', '^a{2$', '^[,-2]$', '^[a{2}]$', '^{,$', '^[[a]$', '^[a]]$',
  ],
};

let seed = 1;
const below = (number) => {
  seed = (seed * 48271) % 2147483647;
  return seed % number;
};
const one = (list) => list[below(list.length)];

function random(depth) {
  const kind = one(['part', 'part', 'many', 'either', 'both', 'both']);
  if (!depth || kind === 'part') {
    return one([
      'a', 'b', '1', '-', '_', '\\d', '\\w', '\\W', '\\D', '\\s', '.', '[ab]',
      '[^a]', '[\\w-]', '[^\\d-]', '\\-', '[1-a]', '[^]', '{', '}', ']',
      '^', '$', '(?:)', '\\x61', '[\\Wa]',
    ]);
  }
  const first = random(depth - 1);
  if (kind === 'many') {
    const many = one(['*', '+', '?', '??', '{2}', '{0,2}', '{1,}']);
    return (below(2) ? `(?:${first})` : first) + many;
  }
  const second = random(depth - 1);
  return kind === 'either' ? `(${first}|${second})` : first + second;
}

function read(pattern) {
  for (const flags of ['u', '']) {
    try {
      return [new RegExp(pattern, flags), flags ? 'u' : 'without'];
    } catch (error) {}
  }
  return [null, 'invalid'];
}

function texts(letters) {
  const found = [''];
  let last = [''];
  for (let length = 0; length < (letters.length > 5 ? 2 : 3); length++) {
    last = last.flatMap((text) => letters.map((letter) => text + letter));
    found.push(...last);
  }
  return found;
}

const table = Object.entries(HAND);
table.push(['ab1-_ ', Array.from({ length: 250 }, () => random(3))]);
for (const [letters, patterns] of table) {
  const every = texts(Array.from(letters));
  for (const pattern of patterns) {
    const [compiled, flag] = read(pattern);
    const bit = (text) => (compiled.test(text) ? '1' : '0');
    const matches = compiled === null ? '' : every.map(bit).join('');
    console.log(JSON.stringify({ pattern, flag, letters, matches }));
  }
}
