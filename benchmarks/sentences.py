"""Sentences in groups of one subject each: what a retrieval with sentence embeddings is tried on.

``GROUPS``: three sentences of a group say much the same. ``CALIBRATION``: other sentences, of other
lengths and subjects, for measuring ranges.
"""

from __future__ import annotations

__all__ = ["CALIBRATION", "GROUPS", "SENTENCES"]

GROUPS: tuple[tuple[str, str, str], ...] = (
    (
        "The cat is asleep on the warm windowsill.",
        "A kitten naps in the sunlight by the window.",
        "Our cat dozes where the sun falls through the glass.",
    ),
    (
        "The train to Vienna leaves at half past seven.",
        "Departure of the Vienna express is scheduled for 7:30.",
        "You have to be on the platform before 7:30 to catch the train to Vienna.",
    ),
    (
        "She repaired the bicycle chain with a small tool.",
        "With a pocket wrench she fixed her bike's chain.",
        "The chain of the bicycle broke, and she mended it herself.",
    ),
    (
        "The central bank raised interest rates by a quarter point.",
        "Borrowing became more expensive after the rate decision of the central bank.",
        "Policy makers lifted the key rate by 25 basis points.",
    ),
    (
        "Add two eggs and a cup of flour to the batter.",
        "Mix flour and eggs into the dough before baking.",
        "The recipe asks for two eggs and a cup of flour.",
    ),
    (
        "The patient complained of a sharp pain in the chest.",
        "A man came to the clinic with stabbing chest pain.",
        "Sudden chest pain brought him to the emergency room.",
    ),
    (
        "The new phone's battery lasts almost two days.",
        "You charge this smartphone only every other day.",
        "Battery life of the handset is close to forty-eight hours.",
    ),
    (
        "Heavy rain flooded the streets of the old town.",
        "After the storm the historic centre stood under water.",
        "The downpour turned the alleys of the old town into streams.",
    ),
    (
        "The goalkeeper saved a penalty in the last minute.",
        "A late penalty was stopped by the keeper.",
        "In the ninetieth minute the goalie held the spot kick.",
    ),
    (
        "The committee rejected the proposal to widen the road.",
        "Plans for a wider road were turned down by the council.",
        "There will be no additional lane, the committee decided.",
    ),
    (
        "Photosynthesis turns light into chemical energy.",
        "Plants store the energy of sunlight in sugar.",
        "Leaves make sugar from carbon dioxide and light.",
    ),
    (
        "He learned to play the violin as a child.",
        "Violin lessons started when he was five years old.",
        "As a small boy he already played the violin.",
    ),
    (
        "The software update fixes a security hole.",
        "A vulnerability is closed by the latest patch.",
        "Install the update: it removes a dangerous bug.",
    ),
    (
        "Whales communicate over hundreds of kilometres.",
        "The songs of whales travel far through the ocean.",
        "Underwater, a whale can be heard at great distances.",
    ),
    (
        "The museum shows paintings of the seventeenth century.",
        "Baroque pictures are on display in the gallery.",
        "An exhibition of Dutch masters opens at the museum.",
    ),
    (
        "The flight was delayed because of fog.",
        "Our plane could not take off in the thick fog.",
        "Fog at the airport kept the aircraft on the ground.",
    ),
    (
        "The bridge was closed after cracks had been found.",
        "Inspectors discovered cracks and shut the bridge to traffic.",
        "No cars may cross the damaged bridge.",
    ),
    (
        "My grandmother knits socks for the whole family.",
        "Grandma makes woollen socks for all of us.",
        "Every winter we get hand-knitted socks from our grandmother.",
    ),
    (
        "The company laid off a tenth of its staff.",
        "One in ten employees lost their job at the firm.",
        "The firm cuts ten percent of its workforce.",
    ),
    (
        "The telescope photographed a distant galaxy.",
        "Astronomers captured an image of a faraway galaxy.",
        "A picture of a galaxy billions of light years away was taken.",
    ),
    (
        "The dog barks whenever the postman rings.",
        "Each time the mail is delivered our dog starts barking.",
        "The postman's bell makes the dog bark.",
    ),
    (
        "The soup needs a little more salt.",
        "I would season this broth a bit more.",
        "Without another pinch of salt the soup tastes flat.",
    ),
    (
        "Children under six travel free of charge.",
        "Kids younger than six need no ticket.",
        "There is no fare for small children up to the age of five.",
    ),
    (
        "The court found the defendant not guilty.",
        "He was acquitted of all charges by the jury.",
        "The accused left the courtroom a free man.",
    ),
    (
        "Glaciers in the Alps are shrinking every year.",
        "Alpine ice is melting faster than before.",
        "Each summer the glaciers of the Alps lose volume.",
    ),
    (
        "The heating in the office is broken again.",
        "It is cold at work since the radiator failed.",
        "Once more there is no heating in our office.",
    ),
    (
        "Bees need flowers that bloom until autumn.",
        "Late-blooming plants feed honeybees in September.",
        "For bees, flowers at the end of summer are vital.",
    ),
    (
        "The novel tells of a family over three generations.",
        "In the book we follow grandparents, parents and children.",
        "Three generations of one family are the heroes of the story.",
    ),
    (
        "How do I reset my password?",
        "I forgot my password and cannot log in.",
        "Where can I choose a new password for my account?",
    ),
    (
        "Electric cars make up half of the new registrations.",
        "Every second new car runs on a battery.",
        "Fifty percent of newly registered vehicles are electric.",
    ),
    (
        "The volcano erupted for the first time in decades.",
        "After forty quiet years lava flows from the mountain again.",
        "An eruption surprised the people living near the volcano.",
    ),
    (
        "The library is open on Sundays from noon.",
        "You can borrow books on Sunday afternoon.",
        "On Sundays the reading room opens at twelve.",
    ),
    (
        "A strong wind blew the tiles off the roof.",
        "The gale damaged the roof of the house.",
        "Roof tiles flew through the garden during the storm.",
    ),
    (
        "The vaccine protects against severe illness.",
        "Those who are vaccinated rarely become seriously ill.",
        "A shot prevents most serious cases of the disease.",
    ),
    (
        "The orchestra rehearses the symphony for the last time.",
        "The final rehearsal of the symphony is tonight.",
        "Before the concert the musicians run through the symphony once more.",
    ),
    (
        "He proved the theorem with an elegant argument.",
        "The mathematician found a short proof.",
        "A surprisingly simple argument settles the conjecture.",
    ),
    (
        "The harvest was poor because of the drought.",
        "A dry summer left farmers with little grain.",
        "Without rain the fields yielded less than usual.",
    ),
    (
        "The river is too cold for swimming in May.",
        "In spring the water of the river is still icy.",
        "Nobody bathes in the river before June.",
    ),
    (
        "Parents demand smaller classes at the school.",
        "There are too many pupils in each classroom, families say.",
        "Mothers and fathers call for fewer students per teacher.",
    ),
    (
        "The printer has run out of black ink.",
        "I cannot print until there is a new cartridge.",
        "The black cartridge of the printer is empty.",
    ),
)

SENTENCES: tuple[str, ...] = tuple(sentence for group in GROUPS for sentence in group)

CALIBRATION: tuple[str, ...] = (
    "Yes.",
    "Please close the door behind you.",
    "The quick brown fox jumps over the lazy dog.",
    "In 1969, two astronauts walked on the moon while a third waited in orbit.",
    "Our hotel was clean, quiet, and only five minutes from the beach.",
    "def main(): print('hello world')",
    "The ministry denied reports that negotiations had failed, and announced a press conference.",
    "Warm up the oven to 180 degrees.",
    "What time is it in Tokyo?",
    "He has been collecting stamps since he was a boy, mostly from South America.",
    "Quarterly revenue rose by 4.2% to $1.3 billion.",
    "The mitochondrion is the powerhouse of the cell.",
    "I am sorry for the late reply; I was travelling and had no connection.",
    "Turn left at the church, then follow the road for two miles.",
    "To be, or not to be, that is the question.",
    "The defendant shall pay the costs of the proceedings.",
    "Snow is expected above 800 metres tonight.",
    "She laughed so hard that she spilled her tea all over the newspaper.",
    "Error 404: the page you are looking for does not exist.",
    "Many birds migrate south in autumn, guided by the stars and the magnetic field of the earth.",
    "Gold prices fell as investors turned to shares.",
    "Could you send me the minutes of yesterday's meeting, together with the slides?",
    "Wash at 40 degrees with similar colours. Do not tumble dry.",
    "The painter mixed blue and yellow until the green of the meadow was right.",
    "Once upon a time there lived, at the edge of a great forest, a woodcutter and his wife.",
    "Python lists are mutable; tuples are not.",
    "We regret to inform you that the position has been filled.",
    "The bus was full.",
    "A triangle with sides of three, four and five has a right angle.",
    "Do not feed the animals.",
    "After years of drought, the reservoir is finally full, and the village celebrates with music.",
    "The old clock in the hall strikes thirteen.",
)
