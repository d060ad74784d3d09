//! What keeps the documents true: each `cgpu` command line in them parses, each configuration key,
//! file, `make` target and link that they name exists, and what exists is documented. No privilege
//! is needed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cgpu_cli::commands::Cli;
use cgpu_core::request::setting_names::{NAMES, NVIDIA_MEMORY_LIMIT, NVIDIA_VISIBLE_DEVICES};
use cgpu_host::config::Config;
use clap::{Command, CommandFactory};

/// Commands and `make` targets that other branches bring; their command lines are not parsed until
/// they are here. Empty when all is merged.
const AWAITED_COMMANDS: &[&str] = &[];
const AWAITED_TARGETS: &[&str] = &[];

/// Words of command lines that stand for something of the reader's.
const PLACEHOLDERS: &[(&str, &str)] = &[
    ("MIB", "4096"),
    ("N", "2"),
    ("INDEX", "0"),
    ("GPU", "0"),
    ("ENGINE", "docker"),
    ("LIST", "compute,utility"),
];

/// Root directories whose files the documents may name by path.
const DIRECTORIES: &[&str] =
    &["src", "tests", "docs", "config", "hooks", "packaging", "benches", "fuzz", ".ci"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A document: its path below the root, and its text.
struct Page {
    path: PathBuf,
    text: String,
}

impl Page {
    fn of(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let text = read(&root().join(&path));
        Page { path, text }
    }

    fn name(&self) -> std::path::Display<'_> {
        self.path.display()
    }

    /// Lines that are code (indented by four or more, which no text is here), and all inline code.
    fn code(&self) -> Vec<String> {
        let is_block = |line: &&str| line.starts_with("    ");
        let blocks = self.text.lines().filter(is_block).map(|line| line.trim().to_owned());
        blocks.chain(self.inline()).collect()
    }

    /// What stands between backticks, lines joined.
    fn inline(&self) -> Vec<String> {
        let lines = self.text.lines().filter(|line| !line.starts_with("    "));
        let text = lines.collect::<Vec<_>>().join("\n");
        let mut spans = Vec::new();
        for paragraph in text.split("\n\n") {
            let parts: Vec<&str> = paragraph.split('`').collect();
            assert!(parts.len() % 2 == 1, "{}: an odd backtick in {paragraph:?}", self.name());
            let code = parts.iter().skip(1).step_by(2);
            spans.extend(code.map(|span| span.split_whitespace().collect::<Vec<_>>().join(" ")));
        }
        spans
    }
}

fn pages() -> Vec<Page> {
    let entries = fs::read_dir(root().join("docs")).expect("there is docs/");
    let files = entries.map(|entry| entry.expect("docs/ can be read").file_name());
    let mut names: Vec<PathBuf> = files
        .filter(|name| Path::new(name).extension().is_some_and(|ending| ending == "md"))
        .map(|name| Path::new("docs").join(name))
        .collect();
    names.sort();
    assert!(names.len() >= 8, "pages are missing: {names:?}");
    let others = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "hooks/README.md"];
    others.into_iter().map(PathBuf::from).chain(names).map(Page::of).collect()
}

fn page(name: &str) -> Page {
    Page::of(name)
}

/// The words of a command line of `cgpu` in `code`, if it is one.
fn command_line(code: &str) -> Option<Vec<&str>> {
    let line = code.split(" #").next().unwrap_or(code).trim();
    let words: Vec<&str> = line.split_whitespace().collect();
    (words.first() == Some(&"cgpu") && words.len() > 1).then_some(words)
}

fn meant(word: &str) -> &str {
    PLACEHOLDERS.iter().find(|(name, _)| *name == word).map_or(word, |(_, value)| value)
}

/// `words` (the subcommands in it) lead to a command, all of them.
fn names_a_command(words: &[&str]) -> bool {
    let mut command = Cli::command();
    for word in words {
        let Some(found) = command.find_subcommand(word) else { return false };
        command = found.clone();
    }
    true
}

#[test]
fn command_lines_parse() {
    let mut parsed = 0;
    for page in pages() {
        for code in page.code() {
            let Some(words) = command_line(&code) else { continue };
            let is_awaited = AWAITED_COMMANDS.contains(&words[1]) && !names_a_command(&words[1..2]);
            if is_awaited || names_a_command(&words[1..]) {
                continue;
            }
            let words = words.iter().map(|word| meant(word));
            if let Err(error) = Cli::command().try_get_matches_from(words) {
                panic!("{}: `{code}`: {error}", page.name());
            }
            parsed += 1;
        }
    }
    assert!(parsed >= 5, "only {parsed} command lines were found");
}

#[test]
fn awaited_commands_and_targets_are_awaited() {
    for command in AWAITED_COMMANDS {
        assert!(!names_a_command(&[command]), "`cgpu {command}` is here: strike it off the list");
    }
    for target in AWAITED_TARGETS {
        assert!(!targets().contains(*target), "`make {target}` is here: strike it off the list");
    }
}

/// Each command and its long flags are somewhere in `text`.
fn assert_documented(command: &Command, path: &str, text: &str, everything: &str) {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let path = format!("{path} {}", sub.get_name());
        if sub.get_subcommands().next().is_none() {
            let known = text.contains(&format!("`{path}`")) || text.contains(&format!("`{path} "));
            assert!(known, "docs/operations.md lacks `{path}` in its table of commands");
        }
        assert_documented(sub, &path, text, everything);
    }
    for flag in command.get_arguments().filter(|flag| !flag.is_hide_set()) {
        let Some(long) = flag.get_long().filter(|long| !["help", "version"].contains(long)) else {
            continue;
        };
        assert!(everything.contains(&format!("--{long}")), "no document has `{path} --{long}`");
    }
}

#[test]
fn every_command_and_flag_is_documented() {
    let operations = page("docs/operations.md").text;
    let table = section(&operations, "Commands");
    let everything: String = pages().into_iter().map(|page| page.text).collect();
    assert_documented(&Cli::command(), "cgpu", table, &everything);
}

/// The text below the heading `## name`.
fn section<'a>(text: &'a str, name: &str) -> &'a str {
    let (_, after) = text.split_once(&format!("\n## {name}\n")).expect("there is that heading");
    after.split("\n## ").next().unwrap_or(after)
}

/// Every key of the configuration as (table, key); the table is empty for those at the top.
fn keys() -> BTreeSet<(String, String)> {
    let known = toml::Table::try_from(Config::default()).expect("the defaults are plain");
    let mut keys = BTreeSet::new();
    for (name, value) in known {
        match value {
            toml::Value::Table(table) => {
                keys.extend(table.into_iter().map(|(key, _)| (name.clone(), key)));
            }
            _ => {
                keys.insert((String::new(), name));
            }
        }
    }
    keys
}

#[test]
fn configuration_table_lists_exactly_the_existing_keys() {
    let operations = page("docs/operations.md").text;
    let rows = section(&operations, "Configuration").lines().filter(|line| line.starts_with("| "));
    let cell = |text: &str| text.trim().trim_matches('`').to_owned();
    let reported: BTreeSet<_> = rows
        .filter_map(|row| {
            let cells: Vec<&str> = row.split('|').collect();
            let key = cells.get(2).filter(|key| key.contains('`'))?;
            Some((cell(cells[1]), cell(key)))
        })
        .collect();
    assert_eq!(reported, keys());
    for (table, key) in keys() {
        let file = read(&root().join("config/config.toml"));
        assert!(file.contains(&format!("\n{key} = ")), "config/config.toml lacks {table}.{key}");
    }
}

#[test]
fn configuration_keys_that_are_named_exist() {
    let keys = keys();
    let tables: BTreeSet<&str> =
        keys.iter().map(|(table, _)| table.as_str()).filter(|table| !table.is_empty()).collect();
    let is_word = |text: &str| text.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let mut found = 0;
    for page in pages() {
        for code in page.inline() {
            if code.contains('{') {
                continue;
            }
            // `key = value`, `table.key`, `table.key = value`, `[table] key`.
            let name = code.split(" = ").next().unwrap_or(&code).trim();
            let (table, key) = match name.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
                Some((table, key)) => (Some(table), key),
                None => match name.split_once('.') {
                    Some((table, key)) if tables.contains(table) => (Some(table), key),
                    Some(_) => continue,
                    None if code.contains(" = ") => (None, name),
                    None => continue,
                },
            };
            if !is_word(key) {
                continue;
            }
            let exists = keys
                .iter()
                .any(|(at, known)| known == key && table.is_none_or(|table| table == at));
            assert!(exists, "{}: `{code}` is no key of the configuration", page.name());
            found += 1;
        }
        for code in page.inline().iter().filter(|code| code.starts_with('[') && code.ends_with(']'))
        {
            let table = &code[1..code.len() - 1];
            assert!(
                !is_word(table) || tables.contains(table),
                "{}: `{code}` is no table of the configuration",
                page.name()
            );
        }
    }
    assert!(found >= 8, "only {found} keys were found");
}

#[test]
fn files_that_are_named_exist() {
    let mut found = 0;
    for page in pages() {
        let is_part = |c: char| c.is_ascii_alphanumeric() || "./_-".contains(c);
        for word in page.text.split(|c| !is_part(c)) {
            let word = word.trim_end_matches(['.', '/']).trim_start_matches("../");
            let Some((directory, _)) = word.split_once('/') else { continue };
            if !DIRECTORIES.contains(&directory) {
                continue;
            }
            let below = page.path.parent().expect("it is a file's");
            let exists =
                [Path::new(""), below].iter().any(|at| root().join(at).join(word).exists());
            assert!(exists, "{} names {word}, which isn't there", page.name());
            found += 1;
        }
    }
    assert!(found >= 10, "only {found} files were found");
}

/// The targets of the Makefile.
fn targets() -> BTreeSet<String> {
    let makefile = read(&root().join("Makefile"));
    let names = makefile.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name);
    names
        .filter(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn make_targets_that_are_named_exist() {
    let targets = targets();
    for page in pages() {
        for code in page.code() {
            let Some(rest) = code.strip_prefix("make ") else { continue };
            let target = rest.split_whitespace().next().unwrap_or_default();
            let known = targets.contains(target) || AWAITED_TARGETS.contains(&target);
            assert!(known, "{}: there is no `make {target}`", page.name());
        }
    }
}

/// A heading's anchor, as forges make it.
fn anchor(heading: &str) -> String {
    let retained = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading
        .trim()
        .to_lowercase()
        .chars()
        .filter(retained)
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut found = 0;
    for page in pages() {
        for part in page.text.split("](").skip(1) {
            let link = part.split(')').next().unwrap_or_default();
            if link.starts_with("http") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => root().join(&page.path),
                file => root().join(&page.path).parent().expect("it is a file's").join(file),
            };
            assert!(target.exists(), "{}: {link} leads nowhere", page.name());
            if !heading.is_empty() {
                let known = anchors(&read(&target)).contains(heading);
                assert!(known, "{}: {link} leads to no heading", page.name());
            }
            found += 1;
        }
    }
    assert!(found >= 20, "only {found} links were found");
}

/// The table of what becomes of bundles is printed from the code that decides.
#[test]
fn the_table_of_requests_is_the_codes_own() {
    let table = cgpu_core::request::decision_table::markdown();
    let text = page("docs/compatibility.md").text;
    assert!(text.contains(&table), "docs/compatibility.md should have this table:\n{table}");
}

/// `tests/engines-of` prints the rows of the table.
#[test]
fn the_readme_names_the_engines_of_the_table() {
    let compatibility = page("docs/compatibility.md").text;
    let rows = section(&compatibility, "Versions tested").lines();
    let cells = |row: &str| row.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let mut rows = rows.filter(|row| row.starts_with('|')).map(cells);
    let heads = rows.next().expect("a table has a head");
    let suites: Vec<_> = rows.skip(1).collect();
    assert!(suites.len() >= 3, "{suites:?}");
    let readme = page("README.md").text;
    for (column, engine) in heads.iter().enumerate().take(5).skip(2) {
        let versions: Vec<String> = suites
            .iter()
            .map(|row| row[column].splitn(3, '.').take(2).collect::<Vec<_>>().join("."))
            .collect();
        let (last, others) = versions.split_last().expect("a suite has one");
        let sentence = format!("{engine} {} and {last}", others.join(", "));
        assert!(readme.contains(&sentence), "README.md should say: {sentence}");
    }
}

#[test]
fn readme_is_short_and_links_every_page() {
    let readme = page("README.md");
    let lines = readme.text.lines().count();
    assert!(lines <= 150, "README.md has {lines} lines");
    for page in pages().iter().filter(|page| page.path.starts_with("docs")) {
        assert!(readme.text.contains(&format!("({})", page.name())), "no link to {}", page.name());
    }
}

/// The README has every variable and annotation that a container can ask by, and no other.
#[test]
fn readme_lists_exactly_the_variables_and_annotations() {
    let readme = page("README.md").text;
    let rows = section(&readme, "What a container can ask for").lines();
    let reported: BTreeSet<(&str, &str)> = rows
        .filter(|row| row.starts_with("| `"))
        .map(|row| {
            let cells: Vec<&str> =
                row.split('|').map(|cell| cell.trim().trim_matches('`')).collect();
            (cells[1], cells[2])
        })
        .collect();
    let ours = NAMES.iter().map(|name| (name.variable, name.annotation));
    let nvidias = [NVIDIA_VISIBLE_DEVICES, NVIDIA_MEMORY_LIMIT].map(|name| (name, ""));
    assert_eq!(reported, ours.chain(nvidias).collect());
}

/// The services of the compose file ask by variables that there are.
#[test]
fn compose_file_uses_only_variables_of_the_readme() {
    let text = read(&root().join("packaging/compose.yaml"));
    let file: serde_json::Value = serde_saphyr::from_str(&text).expect("it is YAML");
    let services = file["services"].as_object().expect("it has services");
    assert!(services.len() > 1);
    let readme = page("README.md").text;
    for (name, service) in services {
        assert_eq!(service["runtime"], "cgpu", "{name}");
        let environment = service["environment"].as_object().expect("it has variables");
        for (variable, value) in environment {
            assert!(readme.contains(&format!("| `{variable}` |")), "{name}: {variable}");
            assert!(value.is_string(), "{name}: {variable}");
        }
    }
}

/// All of the library and of the crates below it without tests, a string's continued lines joined, in one line.
fn sources() -> String {
    fn files(path: &Path) -> Vec<PathBuf> {
        if path.is_file() {
            return vec![path.to_owned()];
        }
        let entries = fs::read_dir(path).expect("src can be read");
        let mut found: Vec<_> =
            entries.flat_map(|entry| files(&entry.expect("src can be read").path())).collect();
        found.sort();
        found
    }
    let sources = [
        "src",
        "crates/cgpu-cli/src",
        "crates/cgpu-monitor/src",
        "crates/cgpu-inject/src",
        "crates/cgpu-host/src",
        "crates/cgpu-core/src",
        "crates/nvrm/src",
    ];
    let all = sources.iter().flat_map(|of| files(&root().join(of)));
    let all = all.filter(|file| file.file_name().is_some_and(|name| name != "tests.rs"));
    let texts = all.map(|file| {
        let text = read(&file);
        let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
        text[..end].to_owned()
    });
    let text = texts.collect::<Vec<_>>().join("\n");
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    lines
        .iter()
        .map(|line| line.strip_suffix('\\').map_or(format!("{line} "), str::to_owned))
        .collect()
}

/// The messages of all warnings and errors that the code logs, `…` in the place of values.
fn warnings() -> BTreeSet<String> {
    let source = sources();
    let mut found = BTreeSet::new();
    for call in ["warn!(", "error!("] {
        for after in source.split(call).skip(1) {
            let Some((_, text)) = after.split_once('"') else { continue };
            let (literal, behind) = text.split_once('"').unwrap_or((text, ""));
            found.insert(shape(constant(&source, literal, behind).unwrap_or(literal)));
        }
    }
    found.extend(cgpu_host::events::WARNINGS.iter().map(|text| shape(text)));
    // What is nothing but values is somebody else's sentence.
    found.into_iter().filter(|text| text.chars().any(char::is_alphabetic)).collect()
}

/// The sentence of a call whose `literal` is `{NAME}`, or `{}` with a constant `behind` it.
fn constant<'a>(source: &'a str, literal: &str, behind: &str) -> Option<&'a str> {
    let within = literal.strip_prefix('{')?.strip_suffix('}')?;
    let name = match within {
        "" => behind.split(')').next()?.rsplit([':', ' ', ',']).next()?,
        name => name,
    };
    let is_constant = |c: char| c.is_ascii_uppercase() || c == '_';
    if name.is_empty() || !name.chars().all(is_constant) {
        return None;
    }
    let (_, after) = source.split_once(&format!("const {name}: &str ="))?;
    after.split('"').nth(1)
}

/// A format string with `…` for each value, and single spaces.
fn shape(literal: &str) -> String {
    let mut text = String::new();
    let mut rest = literal;
    while let Some((before, after)) = rest.split_once('{') {
        text.push_str(before);
        text.push('…');
        rest = after.split_once('}').map_or("", |(_, rest)| rest);
    }
    text.push_str(rest);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The first column of the tables below "Warnings in the log".
fn reported_warnings() -> BTreeSet<String> {
    let operations = page("docs/operations.md").text;
    let rows = section(&operations, "Warnings in the log").lines();
    // A message that has backticks itself stands between double ones.
    let firsts = rows.filter_map(|row| match row.strip_prefix("| ``") {
        Some(rest) => rest.split("``").next(),
        None => row.strip_prefix("| `")?.split('`').next(),
    });
    firsts.map(str::to_owned).collect()
}

#[test]
fn every_warning_is_explained_and_no_other() {
    let logged = warnings();
    assert!(logged.len() >= 30, "only {} warnings were found", logged.len());
    let reported = reported_warnings();
    let lacking: Vec<_> = logged.difference(&reported).collect();
    assert!(lacking.is_empty(), "docs/operations.md doesn't explain {lacking:#?}");
    let idle: Vec<_> = reported.difference(&logged).collect();
    assert!(idle.is_empty(), "docs/operations.md explains what nothing logs: {idle:#?}");
}

#[test]
fn symptoms_that_are_quoted_from_us_exist() {
    let source = sources();
    let mut literals = BTreeSet::new();
    for literal in source.split('"').skip(1) {
        literals.insert(shape(literal));
    }
    let all = literals.into_iter().collect::<Vec<_>>().join("\n");
    let operations = page("docs/operations.md").text;
    let mut found = 0;
    for row in section(&operations, "Symptoms").lines().filter_map(|row| row.strip_prefix("| `")) {
        let reported = row.split('`').next().unwrap_or_default();
        // Sentences alone: words in backticks that are no sentence, and those of NVIDIA, are not ours.
        if !reported.contains(' ')
            || reported.starts_with("Failed to")
            || reported.starts_with("docker ")
        {
            continue;
        }
        for part in reported.split('…').map(str::trim).filter(|part| part.len() > 3) {
            assert!(all.contains(part), "docs/operations.md: no message has {part:?}");
        }
        found += 1;
    }
    assert!(found >= 4, "only {found} symptoms were found");
}
