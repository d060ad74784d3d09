//! A driver that is newer than all that is known.

use cgpu_sim::{Action, CallFault, Fault, Kind};

use crate::gated::{Gated, MIB, RMTOOL, got_bytes, monitors};

/// `NV2080_CTRL_CMD_GPU_GET_PID_INFO` and `NV2080_CTRL_CMD_FB_GET_INFO_V2`, which audits ask.
const PID_INFO: u32 = 0x2080_018e;
const FB_INFO: u32 = 0x2080_1303;

/// The driver knows no such control any more: `NV_ERR_NOT_SUPPORTED`.
fn no_more(control: u32) -> Fault {
    Fault::Call(CallFault {
        kind: Some(Kind::Control),
        what: Some(control),
        action: Action::Status(0x56),
        times: None,
    })
}

/// Whether a container creation has asked what the driver reports, and believes it.
fn has_asked(gated: &Gated) -> bool {
    gated.host.state_dir().join("driver-answered").exists()
}

/// A driver that does not report what containers hold is given none.
#[test]
fn driver_that_hides_container_usage_gets_no_containers() {
    for (control, what) in [(PID_INFO, "what processes hold"), (FB_INFO, "what is free")] {
        let gated = Gated::with_driver("620.06");
        gated.sim.fault(no_more(control));
        let bundle = gated.bundle("app", 1000, &[RMTOOL, "fill"]);
        let refused = gated.host.runtime().run(&bundle);
        let refused = refused.fails();
        let sentence = format!(
            "driver 620.06 is newer than the last that this version knows (595.45.04), and a monitor \
             could not see what containers hold: it doesn't tell {what} of GPU 0 (status 0x56); \
             install a newer cgpu or an older driver, or set [isolation] unknown_driver = \"serve\" \
             in the configuration to have quotas that no audit checks"
        );
        assert!(refused.stderr.contains(&sentence), "{refused}");
        gated.soon_is_empty();
        assert!(monitors(&gated.host).is_empty());
        // One that answers is served, and believed until it's another or the host boots.
        gated.sim.fault(Fault::Clear);
        assert_eq!(got_bytes(&gated.run("app", 1000, &[RMTOOL, "fill"])), 1000 * MIB);
        gated.sim.fault(no_more(control));
        assert_eq!(got_bytes(&gated.run("app", 1000, &[RMTOOL, "fill"])), 1000 * MIB);
    }
}

#[test]
fn unknown_driver_served_anyway_is_logged() {
    let mut gated = Gated::with_driver("620.06");
    gated.host.set("isolation.unknown_driver", "serve");
    gated.sim.fault(no_more(PID_INFO));
    assert_eq!(got_bytes(&gated.run("app", 1000, &[RMTOOL, "fill"])), 1000 * MIB);
    let log = gated.host.log();
    assert!(log.contains("NO QUOTA IS SEEN TO: driver 620.06"), "{log}");
}

/// Nor is one that is older than what the tables say of others: a container creation costs what it did.
#[test]
fn a_driver_that_is_known_is_not_asked() {
    let gated = Gated::new();
    let bundle = gated.bundle("app", 1000, &["true"]);
    let runtime = gated.host.runtime();
    runtime.create(&bundle).ok();
    assert!(!has_asked(&gated));
    runtime.delete(&bundle).ok();
    let unknown = Gated::with_driver("620.06");
    let bundle = unknown.bundle("app", 1000, &["true"]);
    let runtime = unknown.host.runtime();
    runtime.create(&bundle).ok();
    assert!(has_asked(&unknown));
    runtime.delete(&bundle).ok();
}
