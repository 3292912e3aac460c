//! Sentinels: characters that occur in no text of a request and show where client text went in a rendering.
//!
//! A rendering with sentinels is only believed when it equals the plain rendering once they are taken out; so a
//! template that looks at the characters it disturbs (`trim`, `startswith`, `split`) is noticed, and other places are
//! tried. What can go wrong: a request that uses up the private-use characters, which is refused.

use std::collections::HashSet;

use crate::error::TextError;

/// What a sentinel says about its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    /// Cut here: a segment begins or ends.
    Mark,
    /// A chat message's content ends here.
    End,
    /// A known place inside a content, to find the whole by.
    Locator,
    /// No added token may span this place.
    Inside,
    /// No added token may cover the character before this place.
    After,
    /// No added token may cover the character after this place.
    Before,
}

const SIGNS: [Sign; 6] = [Sign::Mark, Sign::End, Sign::Locator, Sign::Inside, Sign::After, Sign::Before];

/// Private-use characters: planes 15 and 16 have no meaning of their own, and are neither letters nor white space.
const PRIVATE_USE: [std::ops::RangeInclusive<char>; 2] = ['\u{F0000}'..='\u{FFFFD}', '\u{100000}'..='\u{10FFFD}'];

/// One character for each sign.
#[derive(Clone, Debug)]
pub(crate) struct Sentinels {
    characters: [char; SIGNS.len()],
}

impl Sentinels {
    /// Characters that occur in none of the texts.
    pub(crate) fn absent_from<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self, TextError> {
        let is_private = |character: &char| PRIVATE_USE.iter().any(|range| range.contains(character));
        // Their UTF-8 begins with F3 or F4, which ordinary text hardly holds.
        let may_hold = |text: &&str| text.bytes().any(|byte| byte >= 0xF3);
        let used: HashSet<char> = texts.filter(may_hold).flat_map(str::chars).filter(is_private).collect();
        let mut free = PRIVATE_USE.into_iter().flatten().filter(|character| !used.contains(character));
        let mut characters = ['\0'; SIGNS.len()];
        for slot in &mut characters {
            *slot = free.next().ok_or_else(|| {
                TextError::request("the messages use every private-use character; remove those of planes 15 and 16")
            })?;
        }
        Ok(Self { characters })
    }

    pub(crate) fn of(&self, sign: Sign) -> char {
        self.characters[sign as usize]
    }

    fn sign_of(&self, character: char) -> Option<Sign> {
        self.characters.iter().position(|known| *known == character).map(|index| SIGNS[index])
    }

    /// Puts sentinels into a text. `places`: byte offsets; at one offset the order given is kept.
    pub(crate) fn weave(&self, text: &str, mut places: Vec<(usize, Sign)>) -> String {
        places.sort_by_key(|(place, _)| *place);
        let mut woven = String::with_capacity(text.len() + 4 * places.len());
        let mut from = 0;
        for (place, sign) in places {
            woven.push_str(&text[from..place]);
            woven.push(self.of(sign));
            from = place;
        }
        woven.push_str(&text[from..]);
        woven
    }

    /// Takes the sentinels out of a rendering.
    pub(crate) fn read(&self, rendering: &str) -> Reading {
        let mut reading = Reading { text: String::with_capacity(rendering.len()), ..Reading::default() };
        for character in rendering.chars() {
            match self.sign_of(character) {
                None => reading.text.push(character),
                Some(sign) => reading.places.push((reading.text.len(), sign)),
            }
        }
        reading
    }
}

/// A rendering without its sentinels, and where they were (byte offsets in `text`, ascending).
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    pub(crate) text: String,
    pub(crate) places: Vec<(usize, Sign)>,
}

impl Reading {
    pub(crate) fn places_of(&self, sign: Sign) -> Vec<usize> {
        self.places.iter().filter(|(_, known)| *known == sign).map(|(place, _)| *place).collect()
    }

    /// Places that no added token may span, ascending, in half characters: see [`crate::prompt::AddedTokens`].
    pub(crate) fn barriers(&self) -> Vec<usize> {
        let barrier = |(place, sign): &(usize, Sign)| match sign {
            Sign::Inside => Some(2 * place),
            Sign::After => self.text[..*place].char_indices().next_back().map(|(start, _)| 2 * start + 1),
            Sign::Before => Some(2 * place + 1),
            Sign::Mark | Sign::End | Sign::Locator => None,
        };
        let mut barriers: Vec<usize> = self.places.iter().filter_map(barrier).collect();
        barriers.sort_unstable();
        barriers
    }
}
