//! The words of code, comments, messages and documents are the field's: those that readers had to learn stay out,
//! and the name of a test is short enough for a list.

use std::fs;
use std::path::{Path, PathBuf};

/// What must not come back, in the singular and in lower case. Several words are a phrase.
const BANNED: &[&str] = &[
    "told",
    "tells",
    "teller",
    "whoever",
    "nobody",
    "wish",
    "room",
    "house",
    "heir",
    "farewell",
    "comes to here",
    "goes for",
    "made anew",
    "is over",
    "that is none",
    "by hand",
    "held to",
    "stake",
    "books",
    "sweep",
];

/// Files whose words are not ours to choose, as the ends of directories or paths.
const EXEMPT: &[&str] = &[
    // The past is as it was written.
    "CHANGELOG.md",
    // What programs printed on other machines, and what engines and upstream projects write.
    "tests/gpu/results",
    "packaging/tested.md",
    "tests/configurations",
    "tests/bundles",
    "fixtures",
    // The list above.
    "tests/documents/words.rs",
    // What was built, and what was downloaded.
    "target",
    "cache",
];

/// What is read: sources, scripts (which have no extension) and documents.
const READ: &[&str] =
    &["rs", "md", "toml", "yaml", "yml", "sh", "py", "c", "h", "conf", "service", ""];

/// Most words in the name of a test.
const NAME_WORDS_MAX: usize = 8;

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files below `directory` that have words of ours.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory can be read");
    let mut found = Vec::new();
    for entry in entries.map(|entry| entry.expect("a directory can be read")) {
        let (path, kind) = (entry.path(), entry.file_type().expect("an entry has a type"));
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        if EXEMPT.iter().any(|exempt| path.ends_with(exempt)) || is_hidden {
            continue;
        } else if kind.is_dir() {
            found.extend(files(&path));
        } else if kind.is_file() && READ.contains(&extension.as_str()) {
            found.push(path);
        }
    }
    found
}

/// The words of a text in lower case, each with the number of its line. An identifier is as many words as it has
/// parts, and a phrase goes on in the next line.
fn words(text: &str) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        let (mut word, mut last) = (String::new(), ' ');
        for letter in text.chars().chain([' ']) {
            let begins = !letter.is_alphabetic() || (letter.is_uppercase() && last.is_lowercase());
            if begins && !word.is_empty() {
                words.push((line, std::mem::take(&mut word)));
            }
            // No phrase goes beyond it.
            if ".,;:!?()\"`|".contains(letter) {
                words.push((line, letter.into()));
            }
            word.extend(
                letter.is_alphabetic().then_some(letter).into_iter().flat_map(char::to_lowercase),
            );
            last = letter;
        }
    }
    words
}

/// Where a text has banned words: the line, and what it has.
fn banned(text: &str) -> Vec<(usize, &'static str)> {
    let words = words(text);
    let is = |word: &str, banned: &str| {
        word == banned
            || word.strip_suffix('s') == Some(banned)
            || word.strip_suffix("es") == Some(banned)
    };
    let begins = |words: &[(usize, String)], phrase: &str| {
        let mut parts = phrase.split(' ').zip(words.iter());
        words.len() >= phrase.split(' ').count() && parts.all(|(part, (_, word))| is(word, part))
    };
    let at = |start: usize| {
        let found = BANNED.iter().find(|phrase| begins(&words[start..], phrase))?;
        Some((words[start].0, *found))
    };
    (0..words.len()).filter_map(at).collect()
}

/// The names of the tests in a source.
pub(crate) fn test_names(source: &str) -> Vec<&str> {
    let mut lines = source.lines().map(str::trim);
    let mut names = Vec::new();
    while let Some(line) = lines.next() {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            let rest = lines.by_ref().find_map(|line| Some(line.split_once("fn ")?.1));
            names.extend(rest.and_then(|rest| rest.split(['(', '<']).next()));
        }
    }
    names
}

#[test]
fn no_text_has_a_banned_word() {
    let files = files(root());
    assert!(files.len() > 700, "only {} files are found", files.len());
    let mut found = Vec::new();
    for path in files {
        // A program that somebody built next to a source has no words.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let place = path.strip_prefix(root()).expect("it lies below").display().to_string();
        found.extend(banned(&text).iter().map(|(line, word)| format!("{place}:{line}: {word}")));
    }
    assert!(found.is_empty(), "the field has other words:\n{}", found.join("\n"));
}

/// Banned words are found in identifiers of every form and across the ends of lines, and not within longer words.
#[test]
fn banned_words_are_found_in_any_form() {
    let found = |text: &str| banned(text).into_iter().map(|(_, word)| word).collect::<Vec<_>>();
    assert_eq!(found("fn was_told(&self) -> NoRoom"), ["told", "room"]);
    assert_eq!(found("MOST_STAKES, and Nobody's"), ["stake", "nobody"]);
    assert_eq!(banned("a\n/// container that is\n/// over"), [(2, "is over")]);
    assert_eq!(found("what it is. Over there"), [""; 0]);
    assert_eq!(found("a classroom, a warehouse, a mushroom, sweeping, this overcommit"), [""; 0]);
}

#[test]
fn test_names_have_at_most_eight_words() {
    let sources =
        files(root()).into_iter().filter(|path| path.extension().is_some_and(|is| is == "rs"));
    let (mut count, mut long) = (0, Vec::new());
    for path in sources {
        let text = fs::read_to_string(&path).expect("sources are text");
        for name in test_names(&text) {
            count += 1;
            if name.split('_').count() > NAME_WORDS_MAX {
                long.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(count > 1500, "only {count} tests are found");
    assert!(long.is_empty(), "the sentence goes into a comment:\n{}", long.join("\n"));
}
