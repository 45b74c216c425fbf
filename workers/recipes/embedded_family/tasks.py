"""Made-up turns with few degrees of freedom: small Python tasks, Greek dates, tools, thinking, who the model is.

Everything here is written for this recipe or filled from CLDR's Greek locale data (Unicode licence, through Babel).
"""

from __future__ import annotations

import datetime
import json
import random
from functools import lru_cache
from typing import Any

Turns = list[tuple[str, str]]

# (what is asked, function name, arguments, docstring, body); {a}, {b}, {n} are slots
_TASKS = (
    ("adds {n} to every item of a list", "add_{n}", "{a}", "Return a new list with {n} added to every item.",
     "return [item + {n} for item in {a}]"),
    ("keeps the items larger than {n}", "larger_than_{n}", "{a}", "Return the items larger than {n}.",
     "return [item for item in {a} if item > {n}]"),
    ("multiplies every item by {n}", "times_{n}", "{a}", "Return every item multiplied by {n}.",
     "return [item * {n} for item in {a}]"),
    ("counts how often each item occurs", "count_items", "{a}", "Return a dictionary from item to count.",
     "counts = {{}}\n    for item in {a}:\n        counts[item] = counts.get(item, 0) + 1\n    return counts"),
    ("returns the largest item", "largest", "{a}", "Return the largest item.",
     "best = {a}[0]\n    for item in {a}:\n        if item > best:\n            best = item\n    return best"),
    ("returns the sum of the items", "total", "{a}", "Return the sum of the items.",
     "result = 0\n    for item in {a}:\n        result += item\n    return result"),
    ("returns the mean of the items", "mean", "{a}", "Return the mean of the items.",
     "if not {a}:\n        raise ValueError(\"{a} is empty\")\n    return sum({a}) / len({a})"),
    ("reverses a string", "reverse", "{b}", "Return the string reversed.", "return {b}[::-1]"),
    ("tells whether a string is a palindrome", "is_palindrome", "{b}", "Return True if the string reads the same "
     "backwards.", "{b} = {b}.lower()\n    return {b} == {b}[::-1]"),
    ("counts the vowels of a string", "count_vowels", "{b}", "Return the number of vowels.",
     "return sum(1 for letter in {b}.lower() if letter in \"aeiou\")"),
    ("splits a list into chunks of {n}", "chunks_of_{n}", "{a}", "Yield successive chunks of {n} items.",
     "for start in range(0, len({a}), {n}):\n        yield {a}[start:start + {n}]"),
    ("computes the factorial of a number", "factorial", "n", "Return n factorial.",
     "if n < 2:\n        return 1\n    return n * factorial(n - 1)"),
    ("computes the n-th Fibonacci number", "fibonacci", "n", "Return the n-th Fibonacci number.",
     "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"),
    ("tells whether a number is prime", "is_prime", "n", "Return True if n is prime.",
     "if n < 2:\n        return False\n    for divisor in range(2, int(n ** 0.5) + 1):\n"
     "        if n % divisor == 0:\n            return False\n    return True"),
    ("tells whether a number can be divided by {n}", "divisible_by_{n}", "n", "Return True if n can be divided by {n}.",
     "return n % {n} == 0"),
    ("reads the lines of a file", "read_lines", "path", "Return the lines of the file without their ends.",
     "with open(path, encoding=\"utf-8\") as file:\n        return [line.rstrip(\"\\n\") for line in file]"),
    ("loads a JSON file", "load_json", "path", "Return the content of a JSON file.",
     "with open(path, encoding=\"utf-8\") as file:\n        return json.load(file)"),
    ("removes duplicates but keeps the order", "unique", "{a}", "Return the items without duplicates, in order.",
     "seen = set()\n    result = []\n    for item in {a}:\n        if item not in seen:\n            seen.add(item)\n"
     "            result.append(item)\n    return result"),
    ("swaps the keys and values of a dictionary", "invert", "mapping", "Return the dictionary with keys and values "
     "swapped.", "return {{value: key for key, value in mapping.items()}}"),
    ("flattens a list of lists", "flatten", "{a}", "Return one list with the items of every list.",
     "return [item for row in {a} for item in row]"),
    ("repeats a string {n} times", "repeat_{n}", "{b}", "Return the string repeated {n} times.", "return {b} * {n}"),
    ("sorts words by length", "sort_by_length", "{a}", "Return the words sorted by length.",
     "return sorted({a}, key=len)"),
)  # fmt: skip
_ASK = ("Write a Python function that {what}.", "Please write a function that {what}.", "I need a Python function "
        "that {what}.", "How do I write a function that {what}?", "Python: {what}.")  # fmt: skip
_LISTS, _STRINGS = ("items", "values", "numbers", "data", "rows"), ("text", "word", "name", "line", "string")


def task_turns(rng: random.Random) -> Turns:
    """One small programming task and its function."""
    what, name, args, doc, body = rng.choice(_TASKS)
    slots = {"a": rng.choice(_LISTS), "b": rng.choice(_STRINGS), "n": rng.randint(2, 20)}
    what, name, args, doc, body = (part.format(**slots) for part in (what, name, args, doc, body))
    ask = rng.choice(_ASK).format(what=what)
    imports = "import json\n\n\n" if "json." in body else ""
    answer = f'```python\n{imports}def {name}({args}):\n    """{doc}"""\n    {body}\n```'
    turns = [("user", ask), ("model", answer)]
    if rng.random() < 0.15:
        turns += [("user", "What does it do?"), ("model", f"The function `{name}` {what}.")]
    return turns


@lru_cache(maxsize=1)
def _greek() -> Any:
    from babel import Locale

    return Locale("el")


def calendar_turns(rng: random.Random) -> Turns:
    """Dates, months, weekdays and names of countries and languages in Greek."""
    from babel.dates import format_date

    day = datetime.date(2000, 1, 1) + datetime.timedelta(days=rng.randrange(12000))
    kind = rng.random()
    if kind < 0.25:
        text = format_date(day, "full", locale="el")
        return [("user", f"Write the date {day.isoformat()} in Greek."), ("model", text)]
    if kind < 0.55:
        count = rng.randint(3, 8)
        days = [format_date(day + datetime.timedelta(days=i), "full", locale="el") for i in range(count)]
        return [("user", f"Γράψε {count} ημέρες από {format_date(day, 'long', locale='el')}."),
                ("model", "\n".join(f"- {d}" for d in days))]  # fmt: skip
    if kind < 0.65:
        first = rng.randint(1, 12)
        names = [_greek().months["stand-alone"]["wide"][(first - 1 + i) % 12 + 1] for i in range(12)]
        return [("user", f"Γράψε τους μήνες από {names[0]}."), ("model", "\n".join(names))]
    table = _greek().territories if kind < 0.85 else _greek().languages
    from babel import Locale

    english = Locale("en").territories if kind < 0.85 else Locale("en").languages
    code = rng.choice(sorted(set(table) & set(english)))
    if rng.random() < 0.5:
        return [("user", f"Πώς λέγεται στα ελληνικά: {english[code]};"),
                ("model", f"Στα ελληνικά λέγεται: {table[code]}.")]  # fmt: skip
    return [("user", f"Πώς λέγεται στα αγγλικά: {table[code]};"),
            ("model", f"Στα αγγλικά λέγεται: {english[code]}.")]  # fmt: skip


_SELF = (
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
     "I am gemray-tiny, a very small language model with the architecture of Gemma 4. I was trained to test a "
     "serving engine, so I know a little Python, some English prose and some Greek."),
    (("Hello!", "Hi", "Hello", "Good morning", "Hey there", "Hi there!"),
     "Hello! I am gemray-tiny. Ask me for a small Python function, a verse, or a Greek date."),
    (("What can you do?", "How can you help me?", "Help", "What do you know?"),
     "I can write small Python functions, quote and continue verses, explain parts of Python's manual, and write "
     "dates and names in Greek. I am too small to be relied on for facts."),
    (("Thanks!", "Thank you.", "Thank you very much."), "You are welcome!"),
    (("Γεια σου!", "Γεια", "Καλημέρα!"), "Γεια σου! Είμαι το gemray-tiny, ένα πολύ μικρό γλωσσικό μοντέλο."),
    (("Ποιος είσαι;", "Τι είσαι;", "Πώς σε λένε;"),
     "Είμαι το gemray-tiny, ένα πολύ μικρό γλωσσικό μοντέλο. Ξέρω λίγη Python, λίγα αγγλικά και λίγα ελληνικά."),
    (("Are you a real assistant?", "Can I trust you?", "Are your answers right?"),
     "No. I am a test model with a few million parameters. My answers look like text but they are often wrong."),
    (("What is speculative decoding?", "Explain speculative decoding."),
     "A small drafter proposes several tokens, the large target checks them all in one pass and keeps the longest "
     "prefix that it would have written itself. The output is the same; only the time is shorter."),
)  # fmt: skip
_SYSTEM = ("You are a helpful assistant.", "You are a careful programmer.", "Answer briefly.", "Be concise.")


def self_turns(rng: random.Random) -> Turns:
    """Greetings and what the model is, sometimes under a system turn."""
    asks, answer = rng.choice(_SELF)
    turns = [("user", rng.choice(asks)), ("model", answer)]
    return [("system", rng.choice(_SYSTEM)), *turns] if rng.random() < 0.3 else turns


_CITIES = ("Athens", "Paris", "London", "Berlin", "Rome", "Madrid", "Tokyo", "Cairo", "Oslo", "Lisbon", "Vienna")
_TOOLS = (
    ("get_weather", "the weather", "What is the weather in {v}?", ("sunny", "cloudy", "rainy", "windy"),
     "It is {a} in {v}."),
    ("get_time", "the local time", "What time is it in {v}?", ("08:15", "12:30", "17:45", "21:00"),
     "It is {a} in {v}."),
    ("get_population", "the population", "How many people live in {v}?", ("400000", "900000", "3000000"),
     "{a} people live in {v}."),
    ("find_hotel", "a hotel", "Find me a hotel in {v}.", ("Grand Hotel", "Hotel Central", "Park Inn"),
     "You can stay at {a} in {v}."),
)  # fmt: skip
_QUOTE = '<|"|>'


def _thinking(rng: random.Random) -> Turns:
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    thought = f"The user asks for {a} + {b}. {a} + {b} = {a + b}."
    return [
        ("system", "<|think|>"),
        ("user", f"What is {a} + {b}?"),
        ("model", f"<|channel>thought\n{thought}\n<channel|>{a} + {b} is {a + b}."),
    ]


def tool_turns(rng: random.Random) -> Turns:
    """A thought channel, or a declared tool called once (spec section 3); also plain system turns over a task."""
    kind = rng.random()
    if kind < 0.3:
        return _thinking(rng)
    if kind < 0.5:
        return [("system", rng.choice(_SYSTEM)), *task_turns(rng)]
    name, gives, ask, answers, final = rng.choice(_TOOLS)
    city, answer = rng.choice(_CITIES), rng.choice(answers)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    declared = json.dumps({"name": name, "description": f"Returns {gives}.", "parameters": schema})
    call = f"<|tool_call>call:{name}{{city:{_QUOTE}{city}{_QUOTE}}}<tool_call|>"
    result = f"<|tool_response>response:{name}{{value:{_QUOTE}{answer}{_QUOTE}}}<tool_response|>"
    return [
        ("system", f"<|tool>{declared}<tool|>"),
        ("user", ask.format(v=city)),
        ("model", f"{call}{result}{final.format(v=city, a=answer)}"),
    ]
