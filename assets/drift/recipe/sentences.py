"""What is said: everyday sentences of three languages, from one small grammar with words of each.

Every slot of a template is a phrase with its article, so that a sentence is right whatever is drawn.
"""

import random
import re
from collections.abc import Iterator

Grammar = dict[str, tuple[str, ...]]


def one_of(choices: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(choices.split(", "))


ENGLISH: Grammar = {
    "sentence": (
        "{person} {does} {thing} {place}",
        "{time} {person} {does} {thing}",
        "{person} {does} {thing} for {person}",
        "there are {number} {things} {place}",
        "{person} always {does} {thing} with {person}",
        "{time} {person} goes {place} with {person}",
        "{person} never {does} {thing} because {reason}",
        "{person} wants {number} {things} {time}",
        "why is {thing} {place}",
        "{thing} is {quality} and {thing} is {quality}",
        "{person} says that {reason}",
        "{person} pays {number} hundred for {thing}",
        "when {reason} {person} {does} {thing}",
    ),
    "person": one_of(
        "the doctor, my brother, my sister, the neighbour, the teacher, our mother, the old farmer, the young baker, "
        "the mayor, your cousin, the driver, the waiter, his daughter, her uncle, the nurse, the painter"
    ),
    "does": one_of(
        "buys, sells, finds, takes, loses, keeps, shows, repairs, forgets, brings, washes, draws, hides, opens, counts"
    ),
    "thing": one_of(
        "the newspaper, the car, the white bread, the letter, the blue coat, the big table, the key, the green lamp, "
        "the red chair, the knife, the book, the bottle, the cheese, the flower, the shirt, the boat, "
        "the black horse, the small dog, the watch, the suitcase"
    ),
    "things": one_of("apples, eggs, glasses, spoons, trees, windows, stones, birds, children, doors, boxes, plates"),
    "place": one_of(
        "in the kitchen, at the market, near the church, behind the house, in the garden, at the station, "
        "under the bridge, in the street, on the roof, at school, in the forest, by the river, in the cellar"
    ),
    "time": one_of(
        "this morning, tomorrow, on monday, on thursday, every evening, next week, today, after dinner, at noon, "
        "on sunday, in winter, in summer, yesterday"
    ),
    "number": one_of("two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, twenty, thirty"),
    "quality": one_of("too heavy, very old, cold, clean, dirty, broken, new, expensive, empty, beautiful"),
    "reason": one_of(
        "it rains, the shop is closed, the train is late, the weather is bad, it is too dark, the night is short, "
        "the water is warm, the sun shines, the snow falls, the war is over"
    ),
}

FRENCH: Grammar = {
    "sentence": (
        "{person} {does} {thing} {place}",
        "{time} {person} {does} {thing}",
        "{person} {does} {thing} pour {person}",
        "il y a {number} {things} {place}",
        "{person} {does} toujours {thing} avec {person}",
        "{time} {person} va {place} avec {person}",
        "{person} ne {does} jamais {thing} car {reason}",
        "{person} veut {number} {things} {time}",
        "pourquoi {thing} est {place}",
        "{thing} est {quality} et {thing} est {quality}",
        "{person} dit que {reason}",
        "{person} paie {number} cents pour {thing}",
        "quand {reason} {person} {does} {thing}",
    ),
    "person": one_of(
        "le médecin, mon frère, ma sœur, la voisine, le professeur, notre mère, le vieux fermier, le jeune boulanger, "
        "le maire, ton cousin, le chauffeur, le serveur, sa fille, son oncle, la bonne, le peintre"
    ),
    "does": one_of(
        "vend, trouve, prend, perd, garde, montre, répare, cherche, jette, lave, dessine, cache, ferme, compte, porte"
    ),
    "thing": one_of(
        "le journal, la voiture, le pain blanc, la lettre, le manteau bleu, la grande table, la clé, la lampe verte, "
        "la chaise rouge, le couteau, le livre, la bouteille, le fromage, la fleur, la chemise, le bateau, "
        "le cheval noir, le petit chien, la montre, la valise"
    ),
    "things": one_of(
        "pommes, verres, cuillères, arbres, fenêtres, pierres, oiseaux, enfants, portes, boîtes, plats, poires"
    ),
    "place": one_of(
        "dans la cuisine, au marché, près du pont, derrière la maison, dans le jardin, à la gare, sous le toit, "
        "dans la rue, chez nous, à la plage, dans la forêt, devant la mairie, dans la cave"
    ),
    "time": one_of(
        "ce matin, demain, lundi, jeudi, chaque soir, la semaine prochaine, maintenant, après le dîner, à midi, "
        "dimanche, en hiver, en été, hier"
    ),
    "number": one_of("deux, trois, quatre, cinq, six, sept, huit, neuf, dix, onze, douze, vingt, trente"),
    "quality": one_of("trop lourd, très vieux, froid, propre, sale, cassé, neuf, cher, vide, joli"),
    "reason": one_of(
        "la pluie commence, le magasin est fermé, le train est en retard, le temps est mauvais, "
        "le ciel est trop noir, la nuit est courte, la soupe est chaude, le soleil brille, "
        "la neige tombe, la guerre est finie"
    ),
}

SPANISH: Grammar = {
    "sentence": (
        "{person} {does} {thing} {place}",
        "{time} {person} {does} {thing}",
        "{person} {does} {thing} para {person}",
        "hay {number} {things} {place}",
        "{person} siempre {does} {thing} con {person}",
        "{time} {person} está {place} con {person}",
        "{person} nunca {does} {thing} porque {reason}",
        "{person} quiere {number} {things} {time}",
        "por qué {thing} está {place}",
        "{thing} es {quality} y {thing} es {quality}",
        "{person} dice que {reason}",
        "{person} paga {number} euros por {thing}",
        "cuando {reason} {person} {does} {thing}",
    ),
    "person": one_of(
        "el médico, mi hermano, mi hermana, la vecina, el profesor, nuestra madre, el viejo granjero, "
        "el joven panadero, el alcalde, tu primo, el chófer, el camarero, su hija, su tío, la enfermera, el pintor"
    ),
    "does": one_of(
        "compra, vende, encuentra, toma, pierde, guarda, muestra, repara, olvida, trae, lava, dibuja, abre, cuenta, "
        "busca"
    ),
    "thing": one_of(
        "el periódico, el coche, el pan blanco, la carta, el abrigo azul, la mesa grande, la llave, la lámpara verde, "
        "la silla roja, el cuchillo, el libro, la botella, el queso, la flor, la camisa, el barco, el caballo negro, "
        "el perro pequeño, el reloj, la maleta"
    ),
    "things": one_of(
        "manzanas, vasos, cucharas, árboles, ventanas, piedras, pájaros, niños, puertas, cajas, platos, huevos"
    ),
    "place": one_of(
        "en la cocina, en el mercado, cerca del puente, detrás de la casa, en el jardín, en la estación, "
        "bajo el techo, en la calle, en la escuela, en la playa, en el bosque, junto al río, en la bodega"
    ),
    "time": one_of(
        "esta mañana, el lunes, el jueves, cada tarde, la semana próxima, ahora, después de la cena, al mediodía, "
        "el domingo, en invierno, en verano, ayer, hoy"
    ),
    "number": one_of("dos, tres, cuatro, cinco, seis, siete, ocho, nueve, diez, once, doce, veinte, treinta"),
    "quality": one_of("muy pesado, demasiado viejo, frío, limpio, sucio, roto, nuevo, caro, vacío, bonito"),
    "reason": one_of(
        "llueve, la tienda está cerrada, el tren llega tarde, el tiempo es malo, es de noche, la noche es corta, "
        "el agua está caliente, brilla el sol, cae la nieve, la guerra terminó"
    ),
}

GRAMMARS = {"en": ENGLISH, "fr": FRENCH, "es": SPANISH}


def expand(symbol: str, grammar: Grammar, rng: random.Random) -> str:
    """Draw one text for a grammar symbol, filling the ``{slots}`` inside it from left to right."""
    return re.sub(r"\{(\w+)\}", lambda slot: expand(slot[1], grammar, rng), rng.choice(grammar[symbol]))


def distinct(language: str, rng: random.Random, seen: set[str]) -> Iterator[str]:
    """Endless stream of sentences that are not in `seen`; adds each one to it."""
    while True:
        sentence = expand("sentence", GRAMMARS[language], rng)
        if sentence not in seen:
            seen.add(sentence)
            yield sentence


def words_of(language: str) -> set[str]:
    """All words of a language."""
    texts = (re.sub(r"\{\w+\}", "", text) for choices in GRAMMARS[language].values() for text in choices)
    return {word for text in texts for word in text.split()}
