//! How the driver makes itself known to the kubelet: [`Registrar`] answers at a socket in the directory that the kubelet
//! watches.

use std::path::PathBuf;

use cgpu_kubelet::dra::{
    HEALTH_SERVICE, InfoRequest, PLUGIN_TYPE, PluginInfo, RegistrationStatus,
    RegistrationStatusResponse, SERVICE,
};
use cgpu_kubelet::plugin_registration::registration_server::Registration;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

/// Answers what the kubelet asks of the driver before it uses it.
#[derive(Debug, Clone)]
pub(crate) struct Registrar {
    pub(crate) driver: String,
    /// Where the driver answers.
    pub(crate) endpoint: PathBuf,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            plugin_type: PLUGIN_TYPE.to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: [SERVICE, HEALTH_SERVICE].map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        match request.into_inner() {
            RegistrationStatus { plugin_registered: true, .. } => {
                info!(driver = self.driver, "the kubelet knows of the driver");
            }
            RegistrationStatus { error, .. } => {
                warn!(
                    "the kubelet does not take the driver: {error}; it needs Kubernetes 1.34 or later"
                );
            }
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
