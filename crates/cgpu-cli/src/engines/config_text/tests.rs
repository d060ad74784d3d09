use proptest::prelude::*;

use super::fixtures::*;
use super::*;

#[test]
fn windows_line_ends_stay() {
    let old = DAEMON.replace('\n', "\r\n");
    let new = add(Format::Docker, &old, ADD);
    assert_eq!(new.matches('\n').count(), new.matches("\r\n").count());
    let old = OWN.replace('\n', "\r\n");
    let new = add(V3, &old, ADD);
    assert_eq!(new.matches('\n').count(), new.matches("\r\n").count());
    assert!(new.len() > old.len());
}

#[test]
fn other_runtimes_named_cgpu_are_refused() {
    let taken = |program: &str| Err(EditError::Taken { program: program.into() });
    let not_a_table = |key: &str| Err(EditError::NotATable { key: key.into() });
    let twice = |key: &str| Err(EditError::Twice { key: key.into() });
    for (format, text, refusal) in [
        (Format::Docker, r#"{"runtimes":{"cgpu":{"path":"/opt/x"}}}"#, taken("/opt/x")),
        (Format::Docker, r#"{"runtimes":{"cgpu":{"runtimeType":"io.x"}}}"#, taken("io.x")),
        (Format::Docker, r#"{"runtimes":{"cgpu":{}}}"#, taken("no program")),
        (Format::Docker, r#"{"runtimes":[]}"#, not_a_table("runtimes")),
        (Format::Docker, r#"{"runtimes":{},"runtimes":{}}"#, twice("runtimes")),
        (
            Format::Docker,
            r#"{"default-runtime":"a","default-runtime":"b"}"#,
            twice("default-runtime"),
        ),
        (Format::Crio, "[crio.runtime.runtimes.cgpu]\nruntime_path = \"/opt/x\"", taken("/opt/x")),
        (Format::Crio, "crio = 1", not_a_table("crio")),
        (Format::Podman, "[engine.runtimes]\ncgpu = [\"/opt/x\"]", taken("/opt/x")),
        (Format::Podman, "[engine]\nruntimes = 3", not_a_table("engine.runtimes")),
        (V1, "[plugins.cri.containerd.runtimes.cgpu]\nruntime_type = \"io.x\"", taken("io.x")),
        (V1, "[[plugins.cri]]", not_a_table("plugins.cri")),
    ] {
        for requested in [ADD, DEFAULT, ChangeRequest::Remove { former: None }] {
            assert_eq!(edit(format, text, requested), refusal, "{text}");
        }
    }
    for (format, text) in [
        (Format::Docker, "{"),
        (Format::Docker, "[]"),
        (Format::Docker, "{} // no comment"),
        (Format::Docker, "{\"a\": 1,}"),
        (Format::Docker, "\u{feff}{}"),
        (V2, "version = "),
        (V2, "a = 1\na = 2"),
        (Format::Podman, "[engine"),
    ] {
        assert!(matches!(edit(format, text, ADD), Err(EditError::Syntax { .. })), "{text}");
    }
}

proptest! {
    #[test]
    fn no_text_breaks_an_edit(text in "[\\[\\]{}a-c=.,\"\n :0-9]{0,60}", which in 0..6usize) {
        let format = [Format::Docker, Format::Crio, Format::Podman, V1, V2, V3][which];
        if let Ok(new) = edit(format, &text, DEFAULT) {
            prop_assert_eq!(edit(format, &new, DEFAULT), Ok(new.clone()));
            let back = edit(format, &new, ChangeRequest::Remove { former: Some(&text) }).unwrap();
            prop_assert!(!read(format, &back).unwrap().runtime);
        }
    }
}
