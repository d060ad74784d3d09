//! `cgpu doctor`: what of this host keeps containers from their GPUs, on one screen.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::table::printable;
use super::{Exit, Output};
use crate::doctor::{Finding, Roots, Section, Severity, inspect, judge, worst};

/// Columns of the screen.
const WIDTH: usize = 80;

/// Where the sentences begin: after section, severity and name.
const MARGIN: usize = 30;

/// What begins a remedy.
const ARROW: &str = "-> ";

/// How to look, and to print.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Where the host's file system is, for a look from a container.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// How to print.
    #[command(flatten)]
    pub output: Output,
}

/// Whether words may be coloured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ink {
    Plain,
    Coloured,
}

/// Looks, judges, and prints to `out`, which is a terminal or not.
///
/// # Errors
///
/// Where nothing can be printed; what can't be looked at is a finding.
pub fn run(
    doctor: &Doctor,
    config: Option<PathBuf>,
    terminal: bool,
    out: &mut dyn Write,
) -> Result<Exit> {
    let roots = Roots {
        root: std::path::absolute(&doctor.root)?,
        config,
        config_variable: std::env::var_os(cgpu_host::config::PATH_VARIABLE),
        search: std::env::var_os("PATH"),
    };
    let findings = judge(&inspect(&roots));
    let worst = worst(&findings);
    match doctor.output.format {
        super::Format::Text => {
            let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
            let ink = if terminal && !plain { Ink::Coloured } else { Ink::Plain };
            out.write_all(screen(&findings, ink).as_bytes())?;
        }
        super::Format::Json => {
            let all = json!({"worst": worst, "findings": findings});
            serde_json::to_writer_pretty(&mut *out, &all)?;
            writeln!(out)?;
        }
    }
    out.flush()?;
    Ok(match worst {
        Severity::Ok | Severity::Note => Exit::Success,
        Severity::Warning => Exit::Warned,
        Severity::Error => Exit::Failed,
    })
}

/// The findings as lines of at most [`WIDTH`] columns, and what they come to.
fn screen(findings: &[Finding], ink: Ink) -> String {
    let mut text = String::new();
    let mut before = None;
    for finding in findings {
        let section = if before == Some(finding.section) { "" } else { title(finding.section) };
        before = Some(finding.section);
        let severity = severity(finding.severity);
        let painted = paint(&format!("{severity:<8}"), finding.severity, ink);
        text.push_str(&format!("{section:<10}{painted}{:<12}", finding.name));
        paragraph(&mut text, &printable(&finding.what), "");
        if let Some(remedy) = &finding.remedy {
            text.push_str(&" ".repeat(MARGIN));
            paragraph(&mut text, &printable(remedy), ARROW);
        }
    }
    text.push_str(&summary(findings));
    text
}

fn title(section: Section) -> &'static str {
    match section {
        Section::Driver => "driver",
        Section::Isolation => "isolation",
        Section::Runtimes => "runtimes",
        Section::Engines => "engines",
        Section::Toolkit => "toolkit",
        Section::Cgpu => "cgpu",
    }
}

fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Ok => "ok",
        Severity::Note => "note",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

fn paint(text: &str, severity: Severity, ink: Ink) -> String {
    let colour = match (ink, severity) {
        (Ink::Plain, _) => return text.to_owned(),
        (Ink::Coloured, Severity::Ok) => 32,
        (Ink::Coloured, Severity::Note) => 36,
        (Ink::Coloured, Severity::Warning) => 33,
        (Ink::Coloured, Severity::Error) => 31,
    };
    format!("\u{1b}[{colour}m{text}\u{1b}[0m")
}

/// `words` after `lead`, whose lines stand under each other next to the margin. A word that
/// fits no line is broken.
fn paragraph(text: &mut String, words: &str, lead: &str) {
    let indent = lead.chars().count();
    let width = WIDTH - MARGIN - indent;
    text.push_str(lead);
    let mut used = 0;
    for word in words.split_whitespace() {
        let mut rest: Vec<char> = word.chars().collect();
        if used > 0 && used + 1 + rest.len() <= width {
            text.push(' ');
            used += 1;
        } else if used > 0 {
            new_line(text, indent);
            used = 0;
        }
        while used + rest.len() > width {
            let tail = rest.split_off(width - used);
            text.extend(rest);
            new_line(text, indent);
            (rest, used) = (tail, 0);
        }
        used += rest.len();
        text.extend(rest);
    }
    text.push('\n');
}

fn new_line(text: &mut String, indent: usize) {
    text.push('\n');
    text.push_str(&" ".repeat(MARGIN + indent));
}

/// What the findings come to.
fn summary(findings: &[Finding]) -> String {
    let count = |severity| findings.iter().filter(|found| found.severity == severity).count();
    let counted = |count, one: &str| match count {
        0 => None,
        1 => Some(format!("1 {one}")),
        _ => Some(format!("{count} {one}s")),
    };
    let all = [
        counted(count(Severity::Error), "error"),
        counted(count(Severity::Warning), "warning"),
        counted(count(Severity::Note), "note"),
    ];
    let said: Vec<String> = all.into_iter().flatten().collect();
    match (said.is_empty(), worst(findings)) {
        (true, _) => "all is well\n".to_owned(),
        (_, Severity::Note) => format!("nothing is wrong; {}\n", said.join(", ")),
        _ => format!("{}\n", said.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(severity: Severity, what: &str, remedy: Option<&str>) -> Finding {
        Finding {
            section: Section::Driver,
            name: "version",
            severity,
            what: what.to_owned(),
            subject: String::new(),
            remedy: remedy.map(str::to_owned),
        }
    }

    /// The findings are aligned within the width, and no control character of a finding reaches the
    /// terminal.
    #[test]
    fn doctor_output_is_aligned_and_escapes_control_characters() {
        let findings = [
            finding(Severity::Ok, "one", None),
            finding(
                Severity::Error,
                "two \u{1b}[2J words and some more, until the line is at its end",
                Some("do this and that, and then the other thing that is left to do"),
            ),
            Finding {
                section: Section::Cgpu,
                ..finding(Severity::Note, &"/long".repeat(20), None)
            },
        ];
        let expected = "\
driver    ok      version     one
          error   version     two \\u{1b}[2J words and some more, until the line
                              is at its end
                              -> do this and that, and then the other thing that
                                 is left to do
cgpu      note    version     /long/long/long/long/long/long/long/long/long/long
                              /long/long/long/long/long/long/long/long/long/long
1 error, 1 note
";
        assert_eq!(screen(&findings, Ink::Plain), expected);
        assert!(expected.lines().all(|line| line.chars().count() <= WIDTH));
        let coloured = screen(&findings, Ink::Coloured);
        assert!(coloured.starts_with("driver    \u{1b}[32mok      \u{1b}[0mversion     one\n"));
        assert!(coloured.contains("\u{1b}[31merror   \u{1b}[0m"));
    }

    #[test]
    fn the_last_line_says_what_it_comes_to() {
        for (severities, line) in [
            (&[Severity::Ok][..], "all is well\n"),
            (&[Severity::Note, Severity::Note], "nothing is wrong; 2 notes\n"),
            (&[Severity::Warning, Severity::Note], "1 warning, 1 note\n"),
            (&[Severity::Error, Severity::Error, Severity::Warning], "2 errors, 1 warning\n"),
        ] {
            let findings: Vec<Finding> =
                severities.iter().map(|severity| finding(*severity, "", None)).collect();
            assert_eq!(summary(&findings), line);
        }
    }
}
