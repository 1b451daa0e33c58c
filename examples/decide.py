"""Questions about one text, answered with probabilities: is it true, which one, how much."""

from quire_client import Client, Question

TEXT = "os.path.join joins pathname components, inserting '/' as needed."
MODULE = Question("Which module is described?", choices=("os.path", "json", "math"))
LENGTH = Question("How long is the text?", levels={"short": "a line", "medium": "a paragraph", "long": "a page"})

with Client() as client:
    is_paths, module, length = client.decide(TEXT, ["The text is about paths.", MODULE, LENGTH]).answers
    print(f"about paths: {is_paths.probabilities[0]:.1%}")
    chance, name = max(zip(module.probabilities, MODULE.choices, strict=True))
    print(f"module: {name} ({chance:.1%})")
    print(f"length: {length.score:.2f} of 0 to 2")
